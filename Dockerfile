# docker build -t abyssal .
# docker run --gpus all --ipc=host -p 8000:8000 -v /data:/data:ro abyssal /data/DeepSeek-V4-Flash
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles its launchers: it wants a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/abyssal
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# Torch 2.11 brings Triton 3.6, the release that the Hopper kernels are tested with.
RUN python3 -m venv /srv/venv \
    && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && /srv/venv/bin/pip install --no-cache-dir --constraint /tmp/constraints.txt torch==2.11.0 . \
    && rm /tmp/constraints.txt

# The home folder holds compiled kernels and downloaded checkpoints: mount a volume there to keep them.
RUN useradd --create-home --uid 10001 abyssal
USER abyssal
EXPOSE 8000
# Loading 800 GB takes a while; until then the port is open and nothing answers.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["/srv/venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["/srv/venv/bin/abyssal", "serve", "--host", "0.0.0.0"]
