"""The programs that bench.mlm lets step in turn. The peers' see nothing of ours but `turns`, beside them."""
