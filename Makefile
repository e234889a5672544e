# Every target first makes .venv ready (tools/setup.sh), which takes no time once it is.
#
# Variables, on the command line or from the environment:
#   PYTHON         interpreter of the virtual environment (python3.11, else 3.12, 3.13 or 3.10)
#   TORCH_INSTALL  pip's arguments for PyTorch, in place of the pinned version
#   ARGS           further arguments of the command behind the target

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo train test lint format package bench clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml tools/setup.sh
	@bash tools/setup.sh $(VENV)

setup: $(READY) ## Make .venv ready, and nothing else

demo: $(READY) ## Run a real sentence encoder on real text, with and without tilewright
	@$(BIN)/tilewright demo $(ARGS)

train: $(READY) ## Train a small GPT, with PyTorch's attention and with tilewright's
	@$(BIN)/python examples/gpt.py $(ARGS)

test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## Run ruff, pyright, the import contracts and the size budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/budget.py

format: $(READY) ## Format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: $(READY) ## Build the wheel and the sdist into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

bench: $(READY) ## Measure against PyTorch's attention and other peers
	@$(BIN)/tilewright bench $(ARGS)

clean: ## Remove .venv, builds and caches
	rm -rf $(VENV) build dist .cache .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find src tests tools examples -name __pycache__ -type d -exec rm -rf {} +
