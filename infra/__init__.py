"""Where latentmill runs: the local stack, images, manifests and dashboards."""
