from pathlib import Path
from swiftlet_mlx import model_classes
Model, ModelArgs = model_classes(Path(__file__).parent)
