# What packages do after they have put files in place or removed them. Part of their scripts.

group_there() {
    getent group uffd >/dev/null || groupadd --system uffd
}

# Whoever was a member would lose it, so a group with members stays.
group_gone() {
    members=$(getent group uffd | cut -d: -f4)
    [ -n "$members" ] || groupdel uffd 2>/dev/null || true
}

rules_changed() {
    if [ -e /run/udev/control ]; then
        udevadm control --reload || true
        udevadm trigger /dev/userfaultfd || true
    fi
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload || true
    fi
}

# Runs go on without the daemon, and claim what they have from the next one.
daemon_restarted() {
    if [ -d /run/systemd/system ]; then
        systemctl try-restart undercroft.service || true
    fi
}

daemon_ended() {
    if [ -d /run/systemd/system ]; then
        systemctl disable --now undercroft.service undercroft.socket || true
    fi
    # The directory of runs is empty once they have ended.
    rm -f /run/undercroft/daemon.sock /run/undercroft/daemon.lock
    rmdir /run/undercroft 2>/dev/null || true
}
