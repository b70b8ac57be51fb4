"""The configuration of a run: one YAML file into these Structs.

Every field does something; a key that is not here is an error.  Units are in the names or in the docs.
"""

from __future__ import annotations

from rollart.config.algorithm import Algorithm
from rollart.config.endpoint import Endpoint
from rollart.config.environments import Environments
from rollart.config.evaluation import Evaluation
from rollart.config.health import Health
from rollart.config.inference import Inference
from rollart.config.model import Model, RandomModel
from rollart.config.rewards import Reward
from rollart.config.rollout import MixedVersions, Rollout, Schedule, UpdateAt
from rollart.config.run import Config
from rollart.config.sampling import Sampling
from rollart.config.tasks import Task
from rollart.config.trainer import Decay, DType, Recompute, Trainer
from rollart.config.weights import StoreKind, Weights

__all__ = [
    "Algorithm",
    "Config",
    "DType",
    "Decay",
    "Endpoint",
    "Environments",
    "Evaluation",
    "Health",
    "Inference",
    "MixedVersions",
    "Model",
    "RandomModel",
    "Recompute",
    "Reward",
    "Rollout",
    "Sampling",
    "Schedule",
    "StoreKind",
    "Task",
    "Trainer",
    "UpdateAt",
    "Weights",
]
