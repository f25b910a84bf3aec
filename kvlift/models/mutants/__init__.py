"""Wrong cores, each of which worlds and stories must find: how strong the claims are."""

from kvlift.models.mutants.mutant import Killed, Mutant
from kvlift.models.mutants.run import MUTANTS, run

__all__ = ["MUTANTS", "Killed", "Mutant", "run"]
