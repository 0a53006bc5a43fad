"""`python -m bevfusion_quant` is the command `bevfusion-quant`."""

from bevfusion_quant.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
