"""The matmul ladder: CUDA C++ kernels, each one step faster than the last, whose memory reads are counted on a CPU.

The text in `cuda/` is the only source of a kernel's index arithmetic. NVRTC compiles it for a GPU (`gpu.py`), and a
small interpreter (`parse.py`, `closures.py`, `interpret.py`) runs the same text for all threads of a grid with numpy,
where every read of global and shared memory is counted (`memory.py`). `rungs.py` lists the kernels with the formulas
that the counts must equal. `chapter.py`, `exercises.py` and `figures.py` are the guide's part on it.
"""
