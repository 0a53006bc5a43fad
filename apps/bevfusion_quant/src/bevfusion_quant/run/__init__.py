"""What every run has, whoever makes it: its folder, its record, what ranks have finished of it."""

from bevfusion_quant.run._folder import (
    CONFIG_FILE,
    DIGESTS_FILE,
    RUN_FORMAT,
    RUN_VERSIONS,
    read_digests,
    run_folder,
    sha256,
    written_text,
)
from bevfusion_quant.run._record import (
    SUMMARY_FILE,
    Clock,
    RunRecord,
    peak_memory_mib,
    versions,
    write_json,
)
from bevfusion_quant.run._shards import run_shards

__all__ = [
    "CONFIG_FILE",
    "DIGESTS_FILE",
    "RUN_FORMAT",
    "RUN_VERSIONS",
    "SUMMARY_FILE",
    "Clock",
    "RunRecord",
    "peak_memory_mib",
    "read_digests",
    "run_folder",
    "run_shards",
    "sha256",
    "versions",
    "write_json",
    "written_text",
]
