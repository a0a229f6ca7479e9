#!/bin/sh
# Open MPI's mpirun over NVIDIA's and AMD's nodes, each with its own Python: one job of two parts (MPMD).
#     CUDA_HOSTS=node7:8 ROCM_HOSTS=node8:8 RANKS_EACH=8 deploy/mpi/openmpi.sh train.py --steps 1000
# The ranks meet through mpi4py, which both environments need, built for this MPI (the wheels of PyPI fit Open MPI 5). -x gives the
# ranks a variable; put those of one side between its `-n` and its Python.
set -eu
: "${CUDA_PYTHON:=/opt/cuda-venv/bin/python}" "${ROCM_PYTHON:=/opt/rocm-venv/bin/python}"
XVCOMM_SECRET=${XVCOMM_SECRET:-$(openssl rand -hex 16)}
export XVCOMM_SECRET

# Without a binding the cores of a node are free to all its ranks: xvcomm's threads need some beside the program's.
exec mpirun --bind-to none \
    -n "$RANKS_EACH" --host "$CUDA_HOSTS" -x XVCOMM_SECRET "$CUDA_PYTHON" "$@" : \
    -n "$RANKS_EACH" --host "$ROCM_HOSTS" -x XVCOMM_SECRET "$ROCM_PYTHON" "$@"
