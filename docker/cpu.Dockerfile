# tilemesh on CPUs, x86-64 and arm64: docker build -f docker/cpu.Dockerfile -t tilemesh .
# docker run --rm --shm-size=1g -v "$PWD/runs:/work/runs" tilemesh train
FROM python:3.12-slim

# As `make` does: the versions and hashes of locks/serve.txt, torch's CPU build (PyPI's brings gigabytes of CUDA).
COPY . /src
RUN PIP_NO_CACHE_DIR=1 TORCH=cpu python /src/scripts/setup.py --purpose serve

# Open MPI starts ranks as root only when told to; ranks exchange through /dev/shm (--shm-size).
ENV PATH=/src/.venv/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
ENTRYPOINT ["tilemesh"]
CMD ["doctor"]
