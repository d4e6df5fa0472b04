"""The contract type "allowlist" of import-linter, used in pyproject.toml.

import-linter can forbid what is listed. A list of what is forbidden is out of date with the next new module, so a seam
between packages is better said the other way round: what may be imported.
"""

import sys
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.domain.imports import Module


def _inside(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


class AllowlistContract(Contract):
    """Modules of `importers` import only themselves and `allowed`; the standard library is always allowed.

    Modules of `exempt` are not judged: another contract is theirs. An import of a package counts as an import of its
    `__init__`, so a package is not allowed by allowing something inside it.
    """

    type_name = "allowlist"

    importers = fields.SetField(subfield=fields.ModuleField())
    allowed = fields.SetField(subfield=fields.ModuleField())
    exempt = fields.SetField(subfield=fields.ModuleField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        importers, allowed, exempt = (_names(found) for found in (self.importers, self.allowed, self.exempt))
        broken: set[tuple[str, int | None, str]] = set()
        for importer in sorted(graph.modules):
            if not _inside(importer, importers) or _inside(importer, exempt):
                continue
            for imported in graph.find_modules_directly_imported_by(importer):
                if imported.split(".")[0] not in sys.stdlib_module_names and not _inside(imported, importers | allowed):
                    details = graph.get_import_details(importer=importer, imported=imported)
                    broken.update((importer, detail["line_number"], imported) for detail in details)
        return ContractCheck(kept=not broken, metadata={"broken": sorted(broken, key=str)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, line, imported in check.metadata["broken"]:
            output.print_error(f"{importer} (line {line}) imports {imported}", bold=False)
        output.new_line()


def _names(field: object) -> set[str]:
    modules = cast("set[Module] | None", field)  # what import-linter has put in place of the declared Field
    return {module.name for module in modules or ()}
