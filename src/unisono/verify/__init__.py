"""Proofs: any plan beside one device, with bounds that follow from arithmetic, and a likely cause where it fails."""
