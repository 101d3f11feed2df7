"""The only importer of the compiled module; a load error names the likely causes."""

try:
    import cpr_ext._C as native
except ImportError as error:
    raise ImportError(
        f"the native core cpr_ext._C could not be loaded: {error}\n"
        "Likely causes:\n"
        "  - cpr_ext was not built: run `pip install .` in its source directory;\n"
        "  - it was built for another Python: reinstall it with the interpreter you run now;\n"
        "  - you are in the source directory and an uninstalled copy is found first:\n"
        "    run from elsewhere, or `pip install -e .`."
    ) from error

__all__ = ["native"]
