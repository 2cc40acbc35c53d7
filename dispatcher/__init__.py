"""The control loop: releases the backlog fairly, and sees to it that nothing that was accepted is forgotten."""
