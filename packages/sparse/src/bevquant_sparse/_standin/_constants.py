"""`spconv.constants`: settings that models write. Only the layout of loaded weights counts here."""

import os

__name__ = "spconv.constants"

# Layout of the sparse weights in state dicts that are loaded: "KRSC" (spconv 2), "RSCK" (spconv 1)
# or "RSKC". Empty: each weight's shape decides.
SAVED_WEIGHT_LAYOUT = os.environ.get("SPCONV_SAVED_WEIGHT_LAYOUT", "")
if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(
        f"SPCONV_SAVED_WEIGHT_LAYOUT={SAVED_WEIGHT_LAYOUT!r}: expected KRSC, RSKC or RSCK, or unset"
    )
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
SPCONV_ALLOW_TF32 = False
SPCONV_CPP_GEMM = True
SPCONV_CPP_INDICE_PAIRS = True
SPCONV_CPP_INDICE_PAIRS_IGEMM = False
SPCONV_DO_SORT = True
SPCONV_FX_TRACE_MODE = False
SPCONV_USE_DIRECT_TABLE = True
