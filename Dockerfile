# bevquant with its CPU extras: docker build -t bevquant . && docker run -v "$PWD:/data" bevquant demo
FROM python:3.11-slim
COPY . /src
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend cpu "/src[cpu,onnxruntime]" \
    && rm -r /src
WORKDIR /data
ENTRYPOINT ["bevfusion-quant"]
