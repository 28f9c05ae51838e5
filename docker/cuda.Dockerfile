# tilemesh on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t tilemesh:cuda .
# docker run --rm --gpus all --ipc=host -v "$PWD/runs:/work/runs" tilemesh:cuda train gpt2-124m
FROM python:3.12-slim

# Triton compiles a small C helper for each kernel, so the image needs a compiler. CUDA itself comes with torch.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# As `make` does: the versions and hashes of locks/serve.txt and locks/cuda.txt.
COPY . /src
RUN PIP_NO_CACHE_DIR=1 TORCH=cuda python /src/scripts/setup.py --purpose serve

ENV PATH=/src/.venv/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
ENTRYPOINT ["tilemesh"]
CMD ["doctor"]
