"""Tests with other people's libraries, by `make test-extras`. Without the trainers their tests are not collected."""

from importlib.util import find_spec

TRAINERS = ["test_hugging_face.py", "test_lightning.py", "test_trainer_scripts.py"]
collect_ignore = [] if all(map(find_spec, ("lightning", "transformers", "accelerate"))) else TRAINERS
