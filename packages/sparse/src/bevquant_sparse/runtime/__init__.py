"""What compiled kernels of all packages share: numba with its cache, threads, and memory.

`jit`, `task_board` and `threads` need numba; whoever imports one of them without it gets an
ImportError, and takes the way without kernels.
"""
