# partita on CPUs. Not built by the project's checks.
#   docker build -t partita .
#   docker run --rm -v "$PWD":/work partita predict run.yaml --dataset rows.csv --output answers.csv
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/partita

COPY requirements-torch.txt requirements.lock ./
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --requirement requirements-torch.txt \
    && pip install --no-deps --require-hashes --requirement requirements.lock

COPY . .
RUN pip install --no-deps .

RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["partita"]
CMD ["--help"]
