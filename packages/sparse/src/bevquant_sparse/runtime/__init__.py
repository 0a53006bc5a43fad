"""Common runtime of the compiled kernels of all packages: numba with its cache, threads, memory.

`jit`, `task_board` and `threads` need numba. Importing one of them without numba raises
ImportError, and the caller runs without kernels.
"""
