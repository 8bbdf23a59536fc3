# shellcheck shell=bash
# A TPU VM: mounts the share, and nothing else. Runs as root at every boot, on Ubuntu 22.04 and Debian 12.
#   SHARE_SOURCE   SERVER:/PATH                 SHARE_MOUNT   where it is mounted
#   SHARE_VERSION  of NFS: 4.1 or 3             SHARE_ROOT    squashed: the server decides whom files belong to (gateway)
#                                                             or kept: root here is root there (Filestore)

# A service and not a line of /etc/fstab, because it tries again: boot does not wait for a gateway that is still being
# made. Not an automount either: a container that gets an automount from outside can find it empty.
# nconnect: one TCP connection is not all that the network gives. The short times of the attribute cache and no cache
# of what is not there: hosts of one run look for each other's files. nosuid,nodev: data only.
share_unit() {
  local after_mount='' locks=''
  # v3 locks by a protocol of its own that calls back from the server, which no firewall rule of ours admits.
  [[ $SHARE_VERSION != 3 ]] || locks=,nolock
  if [[ $SHARE_ROOT == kept ]]; then
    # A new Filestore share is a folder that only root may write to.
    after_mount="ExecStartPost=/bin/chmod 1777 $SHARE_MOUNT"
  fi
  cat <<UNIT
[Unit]
Description=The share $SHARE_SOURCE at $SHARE_MOUNT
# remote-fs-pre: whatever a mount over the network needs stops after it at shutdown.
Wants=network-online.target remote-fs-pre.target
After=network-online.target remote-fs-pre.target
# A try every 10 s, or every 70 s where nothing answers; after 120 of them somebody has to look.
StartLimitIntervalSec=4h
StartLimitBurst=120

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mount -t nfs -o vers=$SHARE_VERSION,proto=tcp,hard,nconnect=4$locks,noatime,nosuid,nodev,lookupcache=positive,acdirmin=1,acdirmax=5,retry=0,_netdev $SHARE_SOURCE $SHARE_MOUNT
$after_mount
ExecStop=/bin/umount $SHARE_MOUNT
TimeoutStartSec=60
TimeoutStopSec=30
Restart=on-failure
RestartSec=10

[Install]
WantedBy=multi-user.target
UNIT
}

# From the kernel's table: asking the folder itself would hang with a server that is away.
mounted_source() {
  findmnt --noheadings --output SOURCE --types nfs,nfs4 --mountpoint "$SHARE_MOUNT"
}

mount_share() {
  local unit file=/etc/systemd/system/tpu-stack-share.service mounted
  unit=$(share_unit)
  if ! cmp --silent "$file" - <<<"$unit"; then
    # The unit as it was knows what it mounted where.
    [[ ! -e $file ]] || systemctl stop tpu-stack-share.service
    put_file "$file" <<<"$unit"
    systemctl daemon-reload
    systemctl --quiet enable tpu-stack-share.service
  fi
  mounted=$(mounted_source) || mounted=''
  case $mounted in
    "$SHARE_SOURCE") return ;;
    '') ;;
    *) give_up "$mounted is mounted at $SHARE_MOUNT, and in use, where $SHARE_SOURCE should be; reboot to change over" ;;
  esac
  # Without the share nobody but root can write here, so that a run does not fill the boot disk unawares.
  [[ -e $SHARE_MOUNT ]] || install --directory --mode=0555 "$SHARE_MOUNT"
  # "activating" is a try under way, or the pause before the next; "active" a mount that somebody took away since.
  if [[ $(systemctl show --property ActiveState --value tpu-stack-share.service) == activating ]]; then
    say "still trying to mount $SHARE_SOURCE at $SHARE_MOUNT; see: journalctl --unit tpu-stack-share"
    return
  fi
  if systemctl --quiet is-failed tpu-stack-share.service; then
    systemctl reset-failed tpu-stack-share.service
  fi
  systemctl --no-block restart tpu-stack-share.service
  did "mounting $SHARE_SOURCE at $SHARE_MOUNT in the background; see: journalctl --unit tpu-stack-share"
}

need_settings SHARE_SOURCE SHARE_MOUNT SHARE_VERSION SHARE_ROOT
one_at_a_time
if [[ $SHARE_VERSION != 3 ]]; then
  # The package brings rpcbind, which only v3 needs.
  mask_units rpcbind.socket rpcbind.service rpc-statd.service rpc-statd-notify.service
fi
install_packages nfs-common
mount_share
if ! mounted_source >/dev/null; then
  tell mounting
elif ((changes == 0)); then
  tell yes
  say "ready: $SHARE_SOURCE is mounted at $SHARE_MOUNT; nothing had to be done"
else
  tell yes
  say "ready: $SHARE_SOURCE is mounted at $SHARE_MOUNT"
fi
