"""The tutorials' own training scripts, unedited, on a laptop.

    python -m tutorial_lib.lab.run_vendor [--backend cpu|xla] [--ranks 4] path/to/script.py …

The scripts are written for Trainium: they import `neuronx_distributed`, ask torch-xla for a device
and the backend `xla` for their process group. Here they get this library under the vendor's name
(`names`), and gloo, or XLA between CPU processes, under torch-xla's functions (`devices`).
`notebooks/README.md` says how to take a published script and where the course explains its parts.
"""
