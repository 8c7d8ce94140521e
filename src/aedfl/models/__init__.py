"""The built-in models, a registry of them, and the cost of a forward pass.

All are plain modules without in-place operations or control flow that depends on data, so that they run under
`torch.func.vmap`, `torch.func.grad`, `torch.compile` and CUDA graphs.
"""

from .cnn import CNN, cnn
from .lenet5 import LeNet5, lenet5
from .macs import count_macs, example_input, layer_macs
from .mlp import MLP, mlp
from .registry import NAMES, build
from .resnet8 import ResNet8, resnet8
from .textcnn import TextCNN, textcnn
from .vgg9 import VGG9, vgg9

__all__ = [
    "CNN",
    "MLP",
    "NAMES",
    "VGG9",
    "LeNet5",
    "ResNet8",
    "TextCNN",
    "build",
    "cnn",
    "count_macs",
    "example_input",
    "layer_macs",
    "lenet5",
    "mlp",
    "resnet8",
    "textcnn",
    "vgg9",
]
