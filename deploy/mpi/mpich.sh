#!/bin/sh
# MPICH's mpiexec (hydra; Intel MPI's and MVAPICH's take the same) over NVIDIA's and AMD's nodes, each with its own Python.
#     CUDA_HOSTS=node7:8 ROCM_HOSTS=node8:8 RANKS_EACH=8 deploy/mpi/mpich.sh train.py --steps 1000
# The ranks meet through mpi4py, which both environments need, built for this MPI (the wheels of PyPI fit MPICH 4 and 5). Where one
# has none, set XVCOMM_STORE=tcp://node7:29500, with the host of rank 0: then MPI is not used at all.
set -eu
: "${CUDA_PYTHON:=/opt/cuda-venv/bin/python}" "${ROCM_PYTHON:=/opt/rocm-venv/bin/python}"
XVCOMM_SECRET=${XVCOMM_SECRET:-$(openssl rand -hex 16)}
export XVCOMM_SECRET

# The ranks get all variables; -env NAME VALUE gives one side another one.
# The hosts are filled in their order, so each part has its own if their numbers fit.
exec mpiexec -bind-to none -hosts "$CUDA_HOSTS,$ROCM_HOSTS" \
    -n "$RANKS_EACH" "$CUDA_PYTHON" "$@" : \
    -n "$RANKS_EACH" "$ROCM_PYTHON" "$@"
