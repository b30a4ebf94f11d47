#!/usr/bin/env bash
# Environments with the libraries that the benchmarks compare with, one each: Reverb, TorchRL, cpprb, Tianshou, SB3,
# TransferQueue, LeRobot, Lance (with Arrow), WebDataset, MosaicML Streaming, PyG; and d3rlpy and RLlib, with which tests of gear_loader.integrations run.
#
#     bash benchmarks/peers/make.sh [FOLDER [NAME...]]        NAME: reverb torchrl cpprb tianshou sb3
#                           transferqueue lerobot lance webdataset streaming pyg d3rlpy rllib; all by default
#
# FOLDER is .peers of this project by default, which the benchmarks look into by themselves; another one is named to
# them by --peers FOLDER. What is there already is kept. One that cannot be made does not keep the others away: the
# reason is kept in FOLDER/NAME/failed.txt, and the benchmarks and the report give it. About 27 GB, of which TorchRL's
# torch is 5.5, and LeRobot 8.3.
#
# They are separate from .venv and from each other, because Reverb 0.14 wants TensorFlow 2.15, which wants numpy 1 and
# Python 3.9 to 3.11, and because TorchRL's C++ extension loads only beside the torch that it was built for: for
# torchrl 0.14 that is torch 2.14. PyG's NeighborLoader needs torch-sparse, which PyPI has as sources only: it is compiled
# with g++, which takes a long time on two cores. LeRobot 0.4 wants torch below 2.11; torchcodec needs the libraries of FFmpeg
# (Debian: ffmpeg). PYTHON names the interpreter (default: python3.11 if there is one, else python3),
# TORCH the torch of the others (default: the version of constraints.txt), TORCHRL_TORCH that of TorchRL.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 2
folder=${1:-$root/.peers}
(($#)) && shift
names=("$@")
known=(reverb torchrl cpprb tianshou sb3 transferqueue lerobot lance webdataset streaming pyg d3rlpy rllib)
((${#names[@]})) || names=("${known[@]}")
torch=${TORCH:-$(sed -n 's/^torch==//p' "$root/constraints.txt")}
python=${PYTHON:-$(command -v python3.11 || echo python3)}
status=0
tested=(-e "$root" pytest pytest-timeout hypothesis) # where tests of integrations run too

for name in "${names[@]}"; do
    sources=() # packages without wheels, which compile against the torch of the environment
    case $name in
        reverb) packages=("numpy<2" tensorflow-cpu==2.15.1 dm-reverb==0.14.0 "torch==$torch") module=reverb ;;
        torchrl) packages=("torch==${TORCHRL_TORCH:-2.14.1}" torchrl==0.14.1 "${tested[@]}") module=torchrl.data ;;
        cpprb) packages=(cpprb==11.0.0) module=cpprb ;;
        tianshou) packages=("torch==$torch" tianshou==2.0.1 "${tested[@]}") module=tianshou.data ;;
        d3rlpy) packages=("torch==$torch" d3rlpy==2.8.1 "${tested[@]}") module=d3rlpy ;;
        rllib) packages=("torch==$torch" "ray[rllib]==2.60.0" "${tested[@]}") module=ray.rllib.algorithms.dqn ;;
        sb3) packages=("torch==$torch" stable-baselines3==2.9.2 -e "$root") module=gear_loader.integrations.sb3 ;;
        transferqueue) packages=("torch==$torch" TransferQueue==0.1.11 "${tested[@]}" psutil msgpack) module=transfer_queue ;;
        lerobot) packages=(lerobot==0.4.4) module=lerobot.datasets.lerobot_dataset ;;
        lance) packages=("torch==$torch" pylance==14.0.2 pillow) module=lance.torch.data ;;
        webdataset) packages=("torch==$torch" webdataset==1.0.2 pillow) module=webdataset ;;
        streaming) packages=(mosaicml-streaming==0.13.0) module=streaming ;;
        pyg)
            packages=("torch==$torch" torch_geometric==2.8.1 setuptools wheel -e "$root[bench]") module=torch_sparse
            sources=(torch-scatter==2.1.2 torch-sparse==0.6.18)
            ;;
        *)
            echo "make.sh: no peer is called $name; expected some of: ${known[*]}" >&2
            exit 2
            ;;
    esac
    place=$folder/$name
    if [[ -e $place/ready ]]; then
        printf '%s is there\n' "$name"
        continue
    fi
    printf 'making %s: %s\n' "$name" "${packages[*]}"
    log=$(mktemp) || exit 2
    if {
        rm -rf "$place" && mkdir -p "$folder" && "$python" -m venv "$place" &&
            "$place/bin/python" -m pip install --disable-pip-version-check --quiet "${packages[@]}" &&
            { ((!${#sources[@]})) || "$place/bin/python" -m pip install --disable-pip-version-check --quiet \
                --no-build-isolation "${sources[@]}"; } &&
            "$place/bin/python" -c "import $module"
    } >"$log" 2>&1; then
        touch "$place/ready"
    else
        status=1
        mkdir -p "$place"
        why=$(grep -iE 'error' "$log" | tail -n 1)
        printf '%s could not be installed: %s\n' "$name" "${why:-$(tail -n 1 "$log")}" | tee "$place/failed.txt" >&2
    fi
    rm -f "$log"
done
exit "$status"
