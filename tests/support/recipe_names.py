"""The names that the blocks of docs/how-to/recipes.md use without making them: tiny models and data of each library."""

import copy
from pathlib import Path
from typing import Any

import torch
from frameworks import samples, tiny_model
from torch import nn
from torch.nn.functional import cross_entropy

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "f", "g", "h"]
SENTENCES = ["a b c d e f", "c d e f g h", "e f g h a b", "g h a b c d"]


def names_of(library: str, folder: Path) -> dict[str, Any]:
    """The same for the same library, seeds included.

    Args:
        library: the comment that marks the block.
        folder: what the block may write to, the name ``folder`` in it.
    """
    torch.manual_seed(0)
    return {"folder": str(folder), **globals()[f"_{library}"](folder)}


def tokenizer(folder: Path) -> Any:
    """Of single letters, saved to ``folder``."""
    import transformers as hf

    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    made = hf.BertTokenizerFast(str(folder / "vocab.txt"), eos_token="[SEP]")
    made.save_pretrained(folder)
    return made


def images() -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """A classifier of four numbers, its optimizer and samples."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [(torch.randn(4), torch.tensor(index % 2)) for index in range(32)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data


def _trl(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["q_proj", "v_proj"])
    texts = Dataset.from_dict({"text": SENTENCES * 8})
    return {"model": tiny_model("llama"), "texts": texts, "tokenizer": tokenizer(folder), "lora": lora}


def _peft(folder: Path) -> dict[str, Any]:
    rows = samples("llama")
    batches = [
        {name: torch.stack([row[name] for row in rows[at : at + 8]]) for name in rows[0]} for at in range(0, 32, 8)
    ]
    return {"model": tiny_model("llama"), "batches": batches}


def _sentence_transformers(folder: Path) -> dict[str, Any]:
    import transformers as hf
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokenizer(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu")
    pairs = {"anchor": SENTENCES * 8, "positive": [text[::-1] for text in SENTENCES] * 8}
    return {"model": model, "pairs": Dataset.from_dict(pairs)}


def _diffusers(folder: Path) -> dict[str, Any]:
    from diffusers import DDPMScheduler, UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    model = UNet2DModel(in_channels=1, out_channels=1, **blocks, **sizes)
    batches = [(torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randint(100, (2,))) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    return {"model": model, "optimizer": optimizer, "noise_scheduler": scheduler, "batches": batches}


def _ignite(folder: Path) -> dict[str, Any]:
    model, optimizer, data = images()
    return {"model": model, "optimizer": optimizer, "loader": torch.utils.data.DataLoader(data, 8)}


def _mmengine(folder: Path) -> dict[str, Any]:
    from mmengine.model import BaseModel

    inner, _, data = images()

    class Classifier(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            output = self.inner(x)
            return {"loss": cross_entropy(output, y)} if mode == "loss" else output

    model = Classifier()
    in_turn = {"sampler": {"type": "DefaultSampler", "shuffle": False}, "collate_fn": {"type": "default_collate"}}
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": {"batch_size": 8, "dataset": data, **in_turn},
        "epochs": {"by_epoch": True, "max_epochs": 2},
    }


def _skorch(folder: Path) -> dict[str, Any]:
    model, _, data = images()
    inputs, targets = (torch.stack(values).numpy() for values in zip(*data, strict=True))
    return {"model": model, "inputs": inputs, "targets": targets}


def _ema_pytorch(folder: Path) -> dict[str, Any]:
    return _ignite(folder)


def _ray(folder: Path) -> dict[str, Any]:
    model, _, data = images()
    batches = list(torch.utils.data.DataLoader(data, 8))
    return {"make_model": lambda: copy.deepcopy(model), "batches": batches, "number": 0}


def _ultralytics(folder: Path) -> dict[str, Any]:
    import cv2
    import torchvision
    from ultralytics.utils.nms import TorchNMS

    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number in range(8):
        pixels = torch.randint(0, 255, (64, 64, 3), dtype=torch.uint8).numpy()
        cv2.imwrite(str(folder / f"images/{number}.jpg"), pixels)
        (folder / f"labels/{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n", encoding="utf-8")
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n", encoding="utf-8")
    torchvision.ops.nms = TorchNMS.nms  # torchvision's own may be of another index than torch
    few = {"epochs": 2, "imgsz": 64, "batch": 4, "nbs": 4, "workers": 0, "device": "cpu"}  # nbs: steps at each batch
    return {"few": {**few, "optimizer": "SGD", "lr0": 1e-3, "warmup_epochs": 0, "project": str(folder), "plots": False}}


def _torchrl(folder: Path) -> dict[str, Any]:
    from tensordict import TensorDict
    from torchrl.modules import MLP, QValueActor

    network = QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], action_space="one-hot")
    batches = []
    for _ in range(20):
        now, then = torch.randn(16, 4), torch.randn(16, 4)
        action = torch.nn.functional.one_hot(torch.randint(2, (16,)), 2)
        ends = dict.fromkeys(("done", "terminated"), torch.zeros(16, 1, dtype=torch.bool))
        following = {"observation": then, "reward": now[:, :1] * action[:, :1], **ends}
        batches.append(TensorDict({"observation": now, "action": action, "next": following}, [16]))
    return {"network": network, "batches": batches}


def _monai(folder: Path) -> dict[str, Any]:
    from monai.data import DataLoader, Dataset
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from monai.transforms import Compose, EnsureTyped, ScaleIntensityd

    samples = []
    for _ in range(8):
        image, label = 0.3 * torch.randn(1, 16, 16), torch.zeros(1, 16, 16)
        image[:, 4:12, 4:12] += 1
        label[:, 4:12, 4:12] = 1
        samples.append({"image": image, "label": label})
    prepared = Compose([EnsureTyped(["image", "label"]), ScaleIntensityd("image")])  # MetaTensor
    model = UNet(2, 1, 2, channels=(4, 8), strides=(2,), norm="batch")
    return {
        "device": torch.device("cpu"),
        "epochs": 2,
        "loader": DataLoader(Dataset(samples, prepared), 2),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": DiceCELoss(to_onehot_y=True, softmax=True),
    }


def _stable_baselines3(folder: Path) -> dict[str, Any]:
    return {}


def _fastai(folder: Path) -> dict[str, Any]:
    import fastai.callback.progress  # patches Learner
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    model, _, data = images()
    loaders = DataLoaders(DataLoader(data, bs=8), DataLoader(data, bs=8), device=torch.device("cpu"))
    learn = Learner(loaders, model, loss_func=cross_entropy, lr=0.1, opt_func=_sgd(OptimWrapper))
    learn.remove_cb(fastai.callback.progress.ProgressCallback)
    return {"learn": learn, "model": model}


def _sgd(wrapper: Any) -> Any:
    return lambda parameters, **_: wrapper(parameters, opt=torch.optim.SGD, lr=0.1)
