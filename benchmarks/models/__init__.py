"""The models that are measured, and that the whole-program tests use: ordinary fp32 PyTorch, one file per family."""

from benchmarks.models.bert import Bert
from benchmarks.models.convnext import ConvNext
from benchmarks.models.dlrm import DLRM
from benchmarks.models.gpt import GPT, PreNormBlock
from benchmarks.models.llama import Llama, RMSNorm, rotate
from benchmarks.models.mlp import MLP, TrainedMLP
from benchmarks.models.resnet import ResidualNet
from benchmarks.models.unet import UNet
from benchmarks.models.vit import ViT

__all__ = [
    "DLRM",
    "GPT",
    "MLP",
    "Bert",
    "ConvNext",
    "Llama",
    "PreNormBlock",
    "RMSNorm",
    "ResidualNet",
    "TrainedMLP",
    "UNet",
    "ViT",
    "rotate",
]
