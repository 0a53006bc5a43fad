"""Common parts of every run: its folder, its record, finished results of ranks."""

from bevfusion_quant.run._folder import (
    CONFIG_FILE,
    DIGESTS_FILE,
    PAGE_FILE,
    RUN_FORMAT,
    RUN_VERSIONS,
    check_folder,
    read_digests,
    run_folder,
    write_digests,
    written_text,
)
from bevfusion_quant.run._read import (
    BpuSummary,
    RunSettings,
    RunSummary,
    as_settings,
    read_settings,
    read_summary,
    read_written,
    refuse_version,
)
from bevfusion_quant.run._record import (
    SUMMARY_FILE,
    Clock,
    RunRecord,
    new_run,
    return_freed_memory,
    versions,
)

__all__ = [
    "CONFIG_FILE",
    "DIGESTS_FILE",
    "PAGE_FILE",
    "RUN_FORMAT",
    "RUN_VERSIONS",
    "SUMMARY_FILE",
    "BpuSummary",
    "Clock",
    "RunRecord",
    "RunSettings",
    "RunSummary",
    "as_settings",
    "check_folder",
    "new_run",
    "read_digests",
    "read_settings",
    "read_summary",
    "read_written",
    "refuse_version",
    "return_freed_memory",
    "run_folder",
    "versions",
    "write_digests",
    "written_text",
]
