# Ranks on AMD GPUs, with torch. From a checkout, with podman, buildah or docker:
#     python -m build --wheel && podman build -f deploy/images/rocm.Dockerfile -t xvcomm-rocm:0.1.0 .
# HIP, hipRTC and RCCL are the base's, torch is PyTorch's own build for the same ROCm. The containers need /dev/kfd and /dev/dri, which
# AMD's device plug-in gives them, and the group that owns these on the host (supplementalGroups, or --group-add).
ARG BASE=docker.io/rocm/dev-ubuntu-24.04:7.2-complete
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2

FROM ${BASE} AS build
ARG TORCH_INDEX
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY constraints.txt dist/xvcomm-*.whl /build/
RUN python3 -m venv --system-site-packages /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir -c /build/constraints.txt --index-url "$TORCH_INDEX" torch && \
    /opt/venv/bin/pip install --no-cache-dir -c /build/constraints.txt "$(ls /build/xvcomm-*.whl)[torch,rocm,metrics]"

FROM ${BASE}
# For RDMA: the distribution's pyverbs, and the libraries of the network cards.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pyverbs ibverbs-providers && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home xvcomm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH ROCM_PATH=/opt/rocm
USER xvcomm
WORKDIR /home/xvcomm
CMD ["xvcomm", "doctor"]
