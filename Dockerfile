# `compress` for machines with an NVIDIA GPU.
#
#   docker build --tag compress .
#   docker run --rm --gpus all --volume "$PWD:/data" --user "$(id -u):$(id -g)" compress MODEL --ratio 0.5
#
# Paths are those below the current folder. To keep what is downloaded: --volume compress-cache:/cache. To push:
# --env HF_TOKEN, without a value, so that the token stands in no command line. The driver must take CUDA 13.0: 580 or
# newer. On machines without a GPU: Dockerfile.cpu.

# torch's own wheels are of this CUDA version.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Triton compiles a launcher for each kernel where it runs, with a C compiler and Python's headers.
# The archive keeps the newest build of a package alone: a pinned one is soon not to be had.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY LICENSE README.md constraints.txt pyproject.toml /source/
COPY compressor /source/compressor
RUN python3 -m venv /opt/compress \
    && /opt/compress/bin/python -m pip install --no-cache-dir --constraint /source/constraints.txt /source

# Whoever runs it, under whatever number, can write there.
RUN useradd --uid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin compress \
    && install --directory --mode 1777 /cache /data
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    PATH=/opt/compress/bin:$PATH \
    PYTHONUNBUFFERED=1

USER 10001
WORKDIR /data
ENTRYPOINT ["compress"]
CMD ["--help"]
