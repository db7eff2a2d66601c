# A slim Python image is enough: kernels are compiled at run time by the NVRTC wheel, and the driver comes from the
# host through the NVIDIA container runtime. `make image-check` runs these steps without Docker.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY app app
COPY engine engine
COPY cuda_src cuda_src
COPY loadtest loadtest
COPY tessera tessera
# With compiled modules: in a read-only file system no start could keep them.
RUN python -m venv --without-pip /opt/tessera \
    && pip --python /opt/tessera/bin/python install --no-cache-dir --compile --require-hashes -r requirements.lock \
    && pip --python /opt/tessera/bin/python install --no-cache-dir --compile --no-deps .

FROM ${BASE}
COPY --from=build /opt/tessera /opt/tessera
RUN install -d -o 10001 -g 10001 /cache /data /models
USER 10001:10001
WORKDIR /cache
ENV PATH=/opt/tessera/bin:$PATH \
    HOME=/cache \
    TESSERA_CACHE_DIR=/cache/tessera \
    TESSERA_DATA_DIR=/data \
    HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["tessera", "serve", "--host", "0.0.0.0"]
