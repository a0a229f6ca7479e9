# Ranks on host memory. From a checkout, with podman, buildah or docker:
#     python -m build --wheel && podman build -f deploy/images/cpu.Dockerfile -t xvcomm-cpu:0.1.0 .
# Python packages have the versions of constraints.txt; give BASE with its digest (debian@sha256:...) where the rest must repeat too.
ARG BASE=docker.io/library/debian:12.12-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY constraints.txt dist/xvcomm-*.whl /build/
RUN python3 -m venv /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir -c /build/constraints.txt "$(ls /build/xvcomm-*.whl)[metrics]"

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --create-home xvcomm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH XVCOMM_DEVICE=host
USER 1000
WORKDIR /home/xvcomm
# The compiled kernels, for processors like this one: else each container would compile them at its start, for a minute.
RUN echo "import numpy, xvcomm; xvcomm.init().all_reduce(numpy.ones(1))" > first.py && \
    xvcomm run --islands a:1,b:1 first.py && rm first.py
CMD ["xvcomm", "doctor"]
