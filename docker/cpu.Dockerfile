# tilemesh on CPUs, x86-64 and arm64: docker build -f docker/cpu.Dockerfile -t tilemesh .
# docker run --rm --shm-size=1g -v "$PWD/runs:/work/runs" tilemesh train
FROM python:3.12-slim

# The CPU build of torch first: PyPI's brings gigabytes of CUDA packages. The version is
# that of constraints.txt: another would be replaced by PyPI's below.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[mpi,hf,serve]'

# Open MPI starts ranks as root only when told to; ranks exchange through /dev/shm (--shm-size).
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
ENTRYPOINT ["tilemesh"]
CMD ["doctor"]
