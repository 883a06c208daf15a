# Each command works in a fresh checkout, with Python 3.11 or newer and make alone. No root, no GPU.

.DEFAULT_GOAL := translate
PYTHON ?= python3
MINUTES ?= 25
WORKERS ?= 2
TORCH ?=
MODELS ?=
RECORDINGS ?=
JUDGE ?= $(MODELS)/whisper-base
NATURAL ?= data/natural
TEXT ?= data/everyday data/phrasebook
BIN = .venv/bin
DEV = .venv-dev/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYTHONUNBUFFERED = 1
# A new interpreter starts a second earlier where modules are compiled once.
unexport PYTHONDONTWRITEBYTECODE
# Real models and recordings: every test that wants them reads these two variables, and is skipped without them.
ifneq ($(MODELS),)
export MMDEC_MODELS = $(MODELS)
endif
ifneq ($(RECORDINGS),)
export MMDEC_RECORDINGS = $(RECORDINGS)
endif
REAL = $(foreach config,$(wildcard $(MODELS)/*/config.json),$(if $(shell grep -l '"model_type": "whisper"' $(config)),$(patsubst %/config.json,%,$(config))))
SOUNDS = $(foreach kind,wav flac ogg mp3,$(wildcard $(RECORDINGS)/*.$(kind)))

.PHONY: help translate test coverage test-slow test-all peers authors fairseq2 check bench real real-tables corpus train demo site wheel clean
FIT = $(DEV)/python -m mmdec.training fit --config recipes/base.yaml --config recipes/daspeech/phrasebook
LIMIT = --ckpt_path last --trainer.max_time '{minutes: $(MINUTES)}'
PEERS ?= .venv-peers
EAGLE ?= $(PEERS)/EAGLE
AUTHORS ?= .venv-authors
FAIRSEQ2 ?= .venv-fairseq2
DASPEECH ?=

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

translate: .venv/ready  ## translate the sample recordings into out/
	$(BIN)/python -m mmdec translate data/samples/*.wav --output out

test: .venv-dev/ready  ## the tests, with a share of the large grids, files spread over WORKERS=2 processes
	OMP_NUM_THREADS=1 $(DEV)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

coverage: .venv-dev/ready  ## the lines that `make test` runs, and those that it misses
	OMP_NUM_THREADS=1 $(DEV)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --cov mmdec --cov-report term-missing:skip-covered

test-slow: .venv-dev/ready  ## what runs servers, browsers, training, other processes, and every block of the pages
	OMP_NUM_THREADS=1 $(DEV)/python -m pytest -m slow -n $(WORKERS) --dist loadfile

test-all: .venv-dev/ready  ## all tests, every grid whole: hours
	MMDEC_ALL=1 OMP_NUM_THREADS=1 $(DEV)/python -m pytest -n $(WORKERS) --dist load
	$(if $(and $(MODELS),$(SOUNDS)),$(MAKE) real-tables)

peers: $(PEERS)/ready $(EAGLE)  ## drafters beside the code of speculators and of EAGLE's authors, in an environment of its own, PEERS=.venv-peers
	EAGLE=$(EAGLE) OMP_NUM_THREADS=1 PYTHONPATH=. $(PEERS)/bin/python -m pytest --noconftest -p no:cacheprovider -W default tests/peers/test_eagle.py tests/peers/test_exports.py tests/peers/test_speculators.py

authors: .venv-dev/ready  ## DASpeech's own code beside the converted one: DASPEECH=CLONE of github.com/ictnlp/DASpeech
	@test -d "$(DASPEECH)/fairseq" || { echo "make authors needs a clone of github.com/ictnlp/DASpeech, but DASPEECH='$(DASPEECH)' is none: make authors DASPEECH=folder"; exit 2; }
	test -x $(AUTHORS)/bin/python || $(PYTHON) -m venv $(AUTHORS)
	cd $(DEV) && ./python -c 'import site; print(site.getsitepackages()[0])' > $(CURDIR)/$(AUTHORS)/dev
	for folder in $(AUTHORS)/lib/python3*/site-packages; do cp $(AUTHORS)/dev $$folder/dev.pth; done
	$(AUTHORS)/bin/python -m pip install --quiet --no-deps hydra-core omegaconf antlr4-python3-runtime==4.9.3 bitarray cffi
	OMP_NUM_THREADS=1 DASPEECH=$(DASPEECH) PYTHONPATH=. $(AUTHORS)/bin/python -m pytest -q --noconftest -p no:cacheprovider -W default tests/peers/test_daspeech.py

fairseq2: $(FAIRSEQ2)/ready  ## fairseq2's encoder beside ours, in an environment of its own, FAIRSEQ2=.venv-fairseq2
	OMP_NUM_THREADS=1 PYTHONPATH=. $(FAIRSEQ2)/bin/python -m pytest -q --noconftest -p no:cacheprovider -W default -o addopts= tests/peers/test_fairseq2.py

check: .venv-dev/ready  ## style, types, layers
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/pyright
	$(DEV)/lint-imports

bench: .venv-dev/ready  ## every benchmark, ten minutes at most each, into out/bench.json
	$(DEV)/python -m mmdec bench all --json out/bench.json

real: .venv-dev/ready  ## Whispers in MODELS=FOLDER on RECORDINGS=FOLDER: token for token with stock, then real-tables
	@test -n "$(REAL)" || { echo "make real needs a folder of Whisper folders, but MODELS='$(MODELS)' holds none. Name both: make real MODELS=models RECORDINGS=recordings"; exit 2; }
	@test -n "$(SOUNDS)" || { echo "make real needs recordings (wav, flac, ogg, mp3), but RECORDINGS='$(RECORDINGS)' holds none. Name both: make real MODELS=models RECORDINGS=recordings"; exit 2; }
	MMDEC_ALL=1 OMP_NUM_THREADS=1 $(DEV)/python -m pytest -n $(WORKERS) --dist load tests/exactness/test_real_models.py
	$(MAKE) real-tables

# Each recording with drafts and without, into out/real_MODEL.jsonl; where natural voices were built (docs/train/hearing.md),
# also the translator, judged by the Whisper of JUDGE=$(MODELS)/whisper-base.
real-tables: .venv-dev/ready
	mkdir -p out
	for model in $(REAL); do $(DEV)/python -m mmdec transcribe $(SOUNDS) --model $$model --compare --threads 1 --json > out/real_$$(basename $$model).jsonl || exit; done
	test ! -f "$(NATURAL)/manifest.tsv" || for folder in $(TEXT); do $(DEV)/python -m mmdec eval speech --corpus $(NATURAL)/manifest.tsv --text $$folder --judge $(JUDGE) --threads 1 --json out/real_$$(basename $$folder).json || exit; done
	test ! -f "$(NATURAL)/manifest.tsv" || $(DEV)/python -m mmdec bench speech --judge $(JUDGE) --threads 1 --json out/real_bench.json

corpus: .venv-dev/ready  ## the French-English phrasebook corpus: needs espeak-ng and flite
	$(DEV)/python data/build/phrasebook.py --out data/corpus

train: .venv-dev/ready  ## train or resume the small DASpeech on data/corpus, its four stages MINUTES=25 each at most
	@test -d data/corpus || { echo "make train needs data/corpus: make corpus builds it"; exit 2; }
	for stage in units acoustic vocoder; do $(FIT)/$$stage.yaml $(LIMIT) || exit; done
	$(DEV)/python -m mmdec.daspeech.training.export --joint runs/units/checkpoints --network-only runs/units/network.safetensors
	$(FIT)/joint.yaml $(LIMIT)
	$(DEV)/python -m mmdec.daspeech.training.export --out runs/daspeech-phrasebook

demo: .venv/demo  ## the page: translate, transcribe, describe, at http://127.0.0.1:7860
	$(BIN)/python -m mmdec demo

site: .venv-dev/docs  ## the documentation as web pages: open site/index.html
	$(DEV)/python -m sphinx -W --keep-going -q -b html -d .doctrees docs site

wheel: .venv/ready  ## dist/mmdec-*.whl, with the models in it
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## what the commands above wrote, but not .venv and .venv-dev
	rm -rf dist out site .doctrees .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# What calls need. Without a GPU a processor-only torch is taken where the index has one; TORCH=torch==2.11.0 overrides.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("mmdec needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: about 1.6 GB (5.3 GB where torch comes as its CUDA build), a minute or more"
	@test -n "$(TORCH)" || command -v nvidia-smi > /dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0+cpu 2> /dev/null || true
	$(BIN)/python -m pip install --quiet $(TORCH) --editable .
	@touch $@

.venv/demo: .venv/ready
	$(BIN)/python -m pip install --quiet $(TORCH) --editable '.[demo]'
	@touch $@

# What tests, checks and training need as well, with a processor-only torch as in .venv. torchaudio, the tests' reference
# for features, is compiled for torch's CUDA build; what the tests use of it is Python, so the compiled parts go.
.venv-dev/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("mmdec needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
	test -x $(DEV)/python || $(PYTHON) -m venv .venv-dev
	@echo "installing into .venv-dev: about 3.5 GB (5.5 GB where torch comes as its CUDA build), a few minutes"
	@command -v nvidia-smi > /dev/null || $(DEV)/python -m pip install --quiet torch==2.13.0+cpu 2> /dev/null || true
	@$(DEV)/python -c 'import torch' 2> /dev/null || $(DEV)/python -m pip install --quiet torch==2.11.0
	$(DEV)/python -m pip install --quiet torchaudio==2.11.0 --editable '.[test]'
	@$(DEV)/python -c 'import torch; raise SystemExit(torch.version.cuda is not None)' 2> /dev/null && rm -f .venv-dev/lib/python3*/site-packages/torchaudio/lib/*.so || true
	@$(DEV)/python -m pip install --quiet kenlm 2> /dev/null || echo "kenlm cannot be built here: the tests that it judges are skipped"
	@touch $@

# What speculators 0.9.0 runs with, but with mmdec's transformers: it pins 5.19 at most, and runs with 5.23, too.
$(PEERS)/ready: Makefile
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing into $(PEERS): about 1.7 GB, a minute or more"
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0+cpu 2> /dev/null || $(PEERS)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet transformers==5.23.0 'datasets>=4,<=5.1.0' 'loguru<=0.7.3' 'numpy<=2.5.4' openai aiohttp click httpx protobuf psutil pydantic pydantic-settings rich safetensors 'tqdm<=4.70.1' typer pytest
	$(PEERS)/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

# Only the networks' files are downloaded. Where github.com cannot be reached, the tests that need them are skipped;
# EAGLE=folder names a clone that is there.
$(PEERS)/EAGLE: | $(PEERS)/ready
	git clone --quiet --filter blob:none --no-checkout https://github.com/SafeAILab/EAGLE $@ && git -C $@ checkout --quiet cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b -- eagle/model || { rm -rf $@; echo "SafeAILab/EAGLE cannot be cloned here: the tests beside it are skipped"; }

# fairseq2n pins torch 2.9.1, as its CUDA build, so that it cannot share an environment with mmdec; mmdec is read from the
# checkout. It needs the system's libsndfile (Debian: libsndfile1).
$(FAIRSEQ2)/ready: Makefile
	test -x $(FAIRSEQ2)/bin/python || $(PYTHON) -m venv $(FAIRSEQ2)
	@echo "installing into $(FAIRSEQ2): about 7.3 GB, ten minutes"
	$(FAIRSEQ2)/bin/python -m pip install --quiet torch==2.9.1 fairseq2==0.8.1 tbb soundfile soxr pytest
	@touch $@

.venv-dev/docs: .venv-dev/ready
	$(DEV)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
