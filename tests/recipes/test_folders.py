"""Folders of photos as people have them: which classes, splits and counts are found, or what is said instead."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.data.hub import Hub
from recipes.data.images.folder import ImageFolder
from trainer.data.contract import SampleId
from trainer.errors import UserError


def write(folder: Path, *patterns: str) -> None:
    """Write files: ``{cat,dog}/{3}.png`` is three images for each of two classes; others than images are text."""
    for pattern in patterns:
        names = [""]
        for part in re.split(r"(\{[^}]*\})", pattern):
            inner = part[1:-1]
            choices = [part]
            if part.startswith("{"):
                choices = [f"{number}" for number in range(int(inner))] if inner.isdigit() else inner.split(",")
            names = [name + choice for name in names for choice in choices]
        for name in names:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix.lower() in Image.registered_extensions():
                pixels = np.random.default_rng(list(name.encode())).integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(file)
            else:
                file.write_text("text")


def linked(folder: Path) -> None:
    write(folder, "photos/{cat,dog}/{6}.png", "elsewhere/{4}.png")
    (folder / "photos/cat/parent").symlink_to(folder / "photos")
    (folder / "photos/cat/home").symlink_to(folder.parent)
    (folder / "photos/dog/itself").symlink_to(".")
    (folder / "photos/fox").symlink_to(folder / "elsewhere")
    (folder / "photos/fox/gone.png").symlink_to("nowhere.png")
    (folder / "elsewhere/loop").symlink_to(folder / "photos/fox")


def pool(folder: Path) -> None:
    """Splits of links to images that lie beside them."""
    write(folder, "all/{9}.png")
    for number in range(9):
        place = folder / ("val" if number > 5 else "train") / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder / f"all/{number}.png")


def empty_class(folder: Path) -> None:
    write(folder, "{cat,dog}/{5}.png", "fox/{3}.heic")
    (folder / "wolf").mkdir()


PET = "{cat,dog}/{5}.png"
RUNS = (
    "outputs/{a,b}/run.json",
    "outputs/{a,b}/plots/loss.png",
    "cat/outputs/c/{run.json,loss.png}",
    "mlartifacts/1.png",
)
FOUND: dict[str, tuple[tuple[str, ...] | Callable[[Path], None], str, tuple[int, ...], str]] = {
    # files; classes; images for training, validation and test; what the start block says
    "one folder a class": ((PET,), "cat dog", (8, 2), "(cat, dog)"),
    "train and val": (("{train,val}/" + PET,), "cat dog", (10, 10), "training PATH/train, validation PATH/val)"),
    "runs that were started in it": ((PET, *RUNS), "cat dog", (8, 2), "passed over: 3 run folders, 1 hidden)"),
    "capitals": (("{Train,Valid,Test}/" + PET,), "cat dog", (10, 10, 10), "validation PATH/Valid, test PATH/Test)"),
    "shouted": (("{TRAIN,VAL}/{cat,dog}/{5}.JPG",), "cat dog", (10, 10), "validation PATH/VAL"),
    "Training and Testing": (("{Training,Testing}/{glioma,notumor}/{5}.png",), "glioma notumor", (8, 2, 10), "0.1 of"),
    "Validation beside train": (("{train,Validation}/" + PET,), "cat dog", (10, 10), "validation PATH/Validation"),
    "training, validation, evaluation": (
        ("{training,validation,evaluation}/" + PET,),
        "cat dog",
        (10, 10, 10),
        "test ",
    ),
    "each packed in itself": (
        (
            "seg_train/seg_train/{sea,street}/{5}.jpg",
            "seg_test/seg_test/{sea,street}/2.jpg",
            "seg_pred/seg_pred/{7}.jpg",
        ),
        "sea street",
        (8, 2, 2),
        "(training PATH/seg_train/seg_train, test PATH/seg_test/seg_test, validation 0.1 of each class; passed over: "
        "7 images in seg_pred)",
    ),
    "sets": (
        ("training_set/training_set/" + PET, "test_set/test_set/" + PET),
        "cat dog",
        (8, 2, 10),
        "training_set, te",
    ),
    "an archive": (("archive/dataset/{train,val}/" + PET, "archive/about.txt"), "cat dog", (10, 10), "over: 1 .txt)"),
    "an archive of classes": (
        ("archive/PetImages/" + PET, "archive/a.csv"),
        "cat dog",
        (8, 2),
        "training PATH/archive/Pet",
    ),
    "packed twice": (
        ("{train,val}/" + PET, "chest/{train,val}/" + PET, "__MACOSX/chest/train/cat/._0.png"),
        "cat dog",
        (10, 10),
        "passed over: 20 images in chest, 1 hidden)",
    ),
    "classes packed twice": ((PET, "pets/" + PET), "cat dog", (8, 2), "passed over: 10 images in pets)"),
    "masks of an archive": (
        ("CUB/images/{Ani,Tern}/{5}.png", "segmentations/{Ani,Tern}/{5}.png"),
        "Ani Tern",
        (8, 2),
        "training PATH/CUB/images, validation 0.1 of each class; passed over: 10 images in segmentations)",
    ),
    "unlabelled test images, packed twice": (
        ("alphabet_train/alphabet_train/{A,B}/{5}.png", "alphabet_test/alphabet_test/{A,B}.png"),
        "A B",
        (8, 2),
        "passed over: 2 images in alphabet_test)",
    ),
    "test images of other classes": (("train/" + PET, "test/cow/{3}.png"), "cat dog", (8, 2), "3 images in test)"),
    "unlabelled test images": (("train/" + PET, "test/{9}.png"), "cat dog", (8, 2), "passed over: 9 images in test)"),
    "unlabelled images in a folder": (
        ("train/" + PET, "{val,test}/images/{9}.png"),
        "cat dog",
        (8, 2),
        "9 images in val",
    ),
    "a class of trains": (("{bus,train}/{5}.png",), "bus train", (8, 2), "(bus, train)"),
    "masks in each class": (("{covid,normal}/{images,masks}/{5}.png",), "covid normal", (8, 2), "10 images in masks"),
    "masks of the splits": (("{train,val,train_masks}/" + PET,), "cat dog", (10, 10), "10 images in train_masks"),
    "hidden": (
        (
            *(PET, "cat/.ipynb_checkpoints/{5}-checkpoint.png", "dog/@eaDir/{3}.png", "{.git,__MACOSX}/cat/a.png"),
            *("dog/{._0.png,Thumbs.db,.DS_Store}", ".ipynb_checkpoints/a.png"),
        ),
        "cat dog",
        (8, 2),
        "passed over: 7 hidden, 1 .db)",
    ),
    "all suffixes": (
        ("a/{0.JPG,1.jpeg,2.jfif,3.avif,4.webp,5.TIF,6.tiff}", "b/{0.PNG,1.bmp,2.gif,3.jpe,4.pgm,5.heic,6}"),
        "a b",
        (10, 2),
        "passed over: 1 .heic, 1 without a suffix)",
    ),
    "a class without images": (empty_class, "cat dog", (8, 2), "passed over: 3 .heic)"),
    "thumbnails": ((PET, "thumbnails/{4}.png"), "cat dog", (8, 2), "passed over: 1 hidden)"),
    "links": (linked, "cat dog fox", (13, 3), "passed over: 4 links to a folder above, 1 broken links)"),
    "a pool of images": (pool, "a b", (6, 3), "passed over: 9 images in all)"),
    "loose images": ((PET, "{2}.png"), "cat dog", (8, 2), "passed over: 2 outside of class folders)"),
    "parts of classes": (("{oak,ash,elm}/{leaf,bark}/{5}.png",), "ash elm oak", (27, 3), "3 classes"),
    "masks beside their images": (
        ("{benign,normal}/a {5}.png", "benign/a {5}_mask.png", "normal/a {0_mask_1,1-GT}.png"),
        "benign normal",
        (8, 2),
        "passed over: 7 masks beside their images)",
    ),
    "images of people with masks": (
        ("{with,without}/{with_mask_,mask,a_mask_}{3}.png",),
        "with without",
        (16, 2),
        "2 ",
    ),
    "names of another form of Unicode": (
        ("train/{Äpfel,Nüsse}/{5}.png", "val/{A\u0308pfel,Nu\u0308sse}/{5}.png"),
        "Äpfel Nüsse",
        (10, 10),
        "2 classes",
    ),
    "splits in Spanish": (
        ("{Entrenamiento,Validacio\u0301n,Prueba}/" + PET,),
        "cat dog",
        (10, 10, 10),
        "test PATH/Prueba)",
    ),
    "splits in Portuguese": (
        ("{Treino,Validação,Teste}/" + PET,),
        "cat dog",
        (10, 10, 10),
        "training PATH/Treino, validation",
    ),
    "splits in French": (("{Entraînement,Validation,Test}/" + PET,), "cat dog", (10, 10, 10), "PATH/Entraînement, "),
    "splits in German": (
        ("{Trainingsdaten,Validierung,Testdaten}/" + PET,),
        "cat dog",
        (10, 10, 10),
        "test PATH/Testdaten)",
    ),
    "splits in Chinese": (("{训练集,验证集,测试集}/{猫,狗}/{5}.png",), "猫 狗", (10, 10, 10), "validation PATH/验证集"),
    "splits in Japanese": (("{訓練データ,テスト}/" + PET,), "cat dog", (8, 2, 10), "test PATH/テスト,"),
    "classes that begin like splits": (("{trainer,testudo,valley}/{5}.png",), "testudo trainer valley", (12, 3), "3 "),
    "people with one photo": (
        ("{ann,bob}/{5}.png", "{cyd,dan}/0.png"),
        "ann bob cyd dan",
        (10, 2),
        "but 2 with one image",
    ),
    "many classes": (
        ("{20}/{2}.png",),
        " ".join(sorted(map(str, range(20)))),
        (20, 20),
        "20 classes (0, 1, 10, 11, 12,",
    ),
}


def described(folder: Path) -> str:
    return ImageFolder(path=str(folder)).images(8).description.replace(str(folder), "PATH")


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str, tmp_path: Path) -> None:
    files, classes, counts, says = FOUND[name]
    folder = tmp_path / "photos"
    files(tmp_path) if name == "links" else files(folder) if callable(files) else write(folder, *files)
    data = ImageFolder(path=str(folder)).images(8)
    assert data.classes == sorted(classes.split())
    assert tuple(len(part) for part in (data.train, data.valid, data.test) if part) == counts
    assert says in data.description.replace(str(folder), "PATH")


MUST = "data.path must be a folder with one folder of images per class, or with train/ and val/ .and perhaps test/."
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "labels in the names": (
        ("train/{cat,dog}.{5}.jpg", "test1/{3}.jpg"),
        f"PATH has 13 images .passed over: nothing., and no folders of several classes; {MUST}.*; file names or boxes "
        "give no classes$",
    ),
    "labels in the names, and a form to fill in": (
        ("train/{Maine_Coon,saint_bernard}_{5}.jpg", "test1/{3}.jpg", "sampleSubmission.csv", "test.csv"),
        "; file names or boxes give no classes$",
    ),
    "a table of each split": (
        ("train_images/{5}.jpg", "test_images/{3}.jpg", "{sample_submission,test,train}.csv"),
        r"those of PATH/train\.csv to PATH/train_images/metadata\.csv .* data\.name=PATH/train_images data\.label",
    ),
    "a table in each split": (
        ("{train,valid,test}/{3}.jpg", "{train,valid,test}/_classes.csv"),
        r"those of PATH/train/_classes\.csv to PATH/train/metadata\.csv ",
    ),
    "loose images": (
        ("{cat,dog}_{5}.jpg", "labels/labels.csv"),
        r"file names or boxes give no classes; or write those of PATH/labels/labels\.csv to PATH/metadata\.csv ",
    ),
    "folds of two classes": (
        ("fold_{3}/{benign,malignant}/{2}.png",),
        r"hold the folders benign, malignant; if these are the classes or splits, set data\.path=PATH/fold_0;",
    ),
    "sites with classes of their own": (
        ("Site {A,B,C}/{cat,dog}/{2}.png", "Site C/cow/1.png"),
        "hold the folders cat, ",
    ),
    "arrays": (("{cat,dog}/{5}.npy",), r"over: 10 \.npy\).*; images are \.jpg, "),
    "a table beside them": (
        ("train_images/{5}.jpg", "train.csv"),
        r"PATH has 5 .*; or write those of PATH/train\.csv to PATH/train_images/metadata\.csv .*data=hub data\.name=",
    ),
    "images and masks": (
        ("{images,masks}/{5}.png",),
        f"PATH has 5 images .passed over: 5 images in masks., and no .*; {MUST}",
    ),
    "images of a split and boxes": (
        ("{train,valid}/images/{5}.png", "{train,valid}/labels/{5}.txt"),
        "no folders of several.* file names or boxes give no classes",
    ),
    "pairs of domains": (
        ("{trainA,trainB,testA,testB}/{5}.jpg",),
        "PATH has 20 images .*, and no folders of several classes",
    ),
    "parts of one set": (
        ("HAM_images_part_{2}/{5}.jpg", "HAM.csv"),
        "PATH has 10 images .*, and no folders of several classes",
    ),
    "one class": (
        ("cat/{5}.png", "dog/{5}.heic"),
        "data.path=PATH has images of one class only; two are needed",
    ),
    "no images": (
        ("{cat,dog}/{5}.heic",),
        r"PATH has no images \(passed over: 10 \.heic\), and",
    ),
    "files of MNIST": (("raw/t10k-images-idx3-ubyte.gz",), r"PATH has no images \(passed over: 1 \.gz"),
    "domains": (
        ("{amazon,dslr,webcam}/images/{bike,mug,pen}/{2}.jpg",),
        r"PATH: amazon, dslr, webcam hold the folders bike, mug, pen; if these are the classes or splits, set "
        r"data\.path=PATH/amazon/images; if not, move the images out of them",
    ),
    "splits in the classes": (
        ("{cat,dog}/{train,test}/{5}.png",),
        r"PATH: cat, dog hold the folders test, train; if these are the classes or splits",
    ),
    "an archive with the splits and more": (
        ("data/split/{train,val}/" + PET, "data/raw/{5}.png"),
        r"PATH/data: split hold the folders train, val; if .* splits, set data\.path=PATH/data/split",
    ),
    "one folder": (
        ("img_align/img_align/{9}.jpg", "list.csv"),
        r"PATH has 9 images .*1 \.csv\).* those of PATH/list\.csv",
    ),
    "one folder in each split": (
        ("train/train/{5}.jpg", "val/val/{3}.jpg", "train.csv"),
        r"PATH has 8 images .*, and no folders of several",
    ),
    "parts of a set, deeper": (("images_00{2}/images/{5}.png",), "PATH has 10 images .*, and no folders of several"),
    "boxes and masks": (
        ("VOC/{JPEGImages,SegmentationObject}/{4}.png", "VOC/Annotations/{4}.xml"),
        "PATH has 4 images .*xml",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learnt_from_is_said(name: str, tmp_path: Path) -> None:
    files, message = REFUSED[name]
    write(tmp_path, *files)
    with pytest.raises(UserError) as raised:
        described(tmp_path)
    assert re.search(message, str(raised.value).replace(str(tmp_path), "PATH")), raised.value


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of datasets, which opens the table
@pytest.mark.parametrize(
    "files", [("train_images/{8}.png", "test_images/{3}.png"), ("part_0/{4}.png", "part_1/{4}.png")]
)
def test_the_remedy_for_a_table_works(files: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "set", *files, "train.csv", "sample_submission.csv")
    with pytest.raises(UserError) as raised:
        described(tmp_path / "set")
    remedy = re.search(r"to (\S+) \(file_name,label\).* data.name=(\S+) data.label_column=label", str(raised.value))
    assert remedy, raised.value
    table, name = Path(remedy[1]), remedy[2]
    for other in table.parent.glob("*.csv"):
        other.unlink()
    images = [str(file.relative_to(table.parent)) for file in table.parent.rglob("*.png")]
    rows = (f"{image},{'cat' if number % 2 else 'dog'}" for number, image in enumerate(images))
    table.write_text("\n".join(["file_name,label", *rows]))
    data = Hub(name=name, label_column="label", cache_dir=str(tmp_path / "cache")).images(8)
    assert (data.classes, len(data.train) + len(data.valid)) == (["cat", "dog"], 8)


WARNED: dict[str, tuple[tuple[str, ...] | Callable[[Path], None], str]] = {
    "domains of two classes": (
        ("{amazon,dslr,webcam}/{benign,malignant}/{2}.png",),
        "PATH/amazon is one class, with all in benign, malignant; if these are the classes, set data.path=PATH/amazon",
    ),
    "two levels": (
        ("animals/{cat,dog}/{2}.png", "things/{bus,car,hat}/{2}.png"),
        "PATH/animals is one class, with all in cat, dog;",
    ),
    "a class without images": (
        empty_class,
        "PATH has folders without images, which are no classes: fox (3 .heic), wolf (e",
    ),
    "a flat val": (
        ("train/" + PET, "{val,test}/{9}.png"),
        "PATH/val is not used for validation: it has no folders of class",
    ),
    "a flat val, packed": (
        ("train/" + PET, "val/images/{9}.png"),
        "PATH/val is not used for validation: it has no folders",
    ),
    "another training folder": (
        ("{train,Train}/" + PET, "train_masks/" + PET),
        "PATH/Train is not used for training: PATH/train is",
    ),
    "case and blanks": (("{Cat,cat,dog,Dog ,emu}/{2}.png",), "classes differ from Cat, Dog  in case or blanks only"),
}
QUIET = [
    ("{cat,dog}/{2}.png",),
    ("{train,val}/{cat,dog}/{2}.png", "test/{2}.png", "val_masks/{a,b}/1.png"),
    ("{A,a,B,b}/{2}.png",),
    ("{-1,1}/{2}.png",),
    ("{cat,dog}/images/{2}.png",),
]


@pytest.mark.parametrize("name", WARNED)
def test_what_may_not_be_meant_is_warned_of(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, message = WARNED[name]
    files(tmp_path) if callable(files) else write(tmp_path, *files)
    described(tmp_path)
    assert message in caplog.text.replace(str(tmp_path), "PATH")


@pytest.mark.parametrize("files", QUIET)
def test_nothing_is_warned_of(files: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, *files)
    described(tmp_path)
    assert not caplog.text


def test_of_copies_each_file_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "{train,val}/" + PET)
    for name in ("train/cat/1.png", "train/dog/2.png", "val/dog/1.png"):
        (tmp_path / name).write_bytes((tmp_path / "train/cat/0.png").read_bytes())
    described(tmp_path)
    assert "at least 1 of the validation images are training images" in caplog.text


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    write(tmp_path, PET)
    for file in tmp_path.rglob("*.png"):
        file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{hash(file)}\nsize 12345\n")
    with pytest.raises(UserError, match=r"\.png is a pointer of Git LFS; get the images with git lfs pull$"):
        ImageFolder(path=str(tmp_path)).images(8).train.batch([SampleId(0, None)])


def test_images_on_both_sides_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "{train,val,test}/" + PET)
    with caplog.at_level(logging.WARNING, "mantissa"):
        described(tmp_path)
        assert not caplog.text
        (tmp_path / "val/cat/x.png").write_bytes((tmp_path / "train/dog/1.png").read_bytes())
        (tmp_path / "test/cat/y.png").write_bytes((tmp_path / "train/dog/2.png").read_bytes())
        described(tmp_path)
    for part, own, other in (("validation", "val/cat/x", "train/dog/1"), ("test", "test/cat/y", "train/dog/2")):
        named = f"({tmp_path}/{own}.png is {tmp_path}/{other}.png)"
        assert f"1 of the {part} images are training images, too {named}" in caplog.text
