"""Attention in other libraries' conventions, each translated into minimha's own."""
