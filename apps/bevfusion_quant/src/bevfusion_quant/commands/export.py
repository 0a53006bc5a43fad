"""`bevfusion-quant export`: a finished run's model as ONNX files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bevfusion_quant.commands._text import finished_text
from bevfusion_quant.options import Cpu, ExportTarget, FrameOptions, RunOptions

__all__ = ["Export"]


@dataclass(frozen=True, kw_only=True)
class Export(RunOptions, FrameOptions):
    """Write a saved run's model as ONNX files for an engine, and prove them on a frame.

    Without frames one street is made; frames of your own set how many voxels the files can hold.

    Args:
        runs: Folder of all runs; the export is a new one.
        name: The export's folder in it; by default export, export-2, …
        run: The folder of a run that demo or ptq wrote.
        target: tensorrt: the files of CUDA-BEVFusion, the sparse encoder for libspconv, as
            TensorRT 10 takes them (tensorrt10 is the same). tensorrt11: with the types that
            TensorRT 11 takes from the file. onnxruntime, openvino: all for a CPU. autoware: the
            sparse encoder for Autoware's plugin, of a lidar-detector with decoder and head in one
            file. bpu: of a run with --target bpu, the dense parts for hb_mapper. By default what
            the run was quantized for.
        cpu: Of files for a CPU: vnni for one that multiplies int8 exactly (x86 with VNNI or AMX,
            ARM), any for files that are right everywhere, and slower unless the run's weights have
            seven bits (--weight-bits 7 of ptq). By default the one at hand.
        measure: Time each quantized file for a CPU beside its part in float32, on this CPU.
    """

    run: Path
    target: ExportTarget | None = None
    cpu: Cpu | None = None
    measure: bool = False

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.export import export_run, export_text, refuse_wrong_files
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

        settings = read_model_settings(self.run)
        given = self.dataset is not None or self.points
        result = export_run(
            self.run,
            frames_for_run(self if given else replace(self, dataset="street"), settings),
            target=self.target,
            cpu=self.cpu,
            measure=self.measure,
            cameras=self.cameras or None,
            **self.place(command),
        )
        text = finished_text(export_text(result.exported), result, self)
        refuse_wrong_files(result.exported, text)
        return text
