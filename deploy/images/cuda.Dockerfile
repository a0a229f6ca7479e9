# Ranks on NVIDIA GPUs, with torch. From a checkout, with podman, buildah or docker:
#     python -m build --wheel && podman build -f deploy/images/cuda.Dockerfile -t xvcomm-cuda:0.1.0 .
# CUDA, NCCL and torch are wheels of PyPI, in the versions of constraints.txt; the driver is the host's, by NVIDIA's container toolkit.
# Give BASE with its digest (debian@sha256:...) where the rest must repeat too.
ARG BASE=docker.io/library/debian:12.12-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY constraints.txt dist/xvcomm-*.whl /build/
RUN python3 -m venv --system-site-packages /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir -c /build/constraints.txt "$(ls /build/xvcomm-*.whl)[torch,cuda,metrics]"

FROM ${BASE}
# For RDMA: Debian's pyverbs, and the libraries of the network cards.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pyverbs ibverbs-providers && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --create-home xvcomm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/xvcomm
CMD ["xvcomm", "doctor"]
