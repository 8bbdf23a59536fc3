# shellcheck shell=bash
# The gateway: a small Debian 12 VM that serves one ext4 disk over NFS. Runs as root at every boot.
#   SHARE_DEVICE   the disk, /dev/disk/by-id/google-NAME     SHARE_DISK_WAIT_S  how long to wait for it
#   SHARE_EXPORT   where it is mounted and exported          SHARE_CLIENTS      address ranges, a blank between two
#   SHARE_UID, SHARE_GID   whom every file belongs to, whoever writes it

wait_for_disk() {
  local until_s=$((SECONDS + SHARE_DISK_WAIT_S))
  while [[ ! -b $SHARE_DEVICE ]]; do
    if ((SECONDS >= until_s)); then
      give_up "no disk $SHARE_DEVICE after $SHARE_DISK_WAIT_S s; attach it to this VM under the device name ${SHARE_DEVICE##*/google-} and reboot"
    fi
    sleep 1
  done
}

# Only a disk that nobody has ever written to is formatted: no signature that blkid knows, and nothing but zeros where
# signatures, partition tables and superblocks are. A file system with a damaged superblock is still somebody's data.
make_file_system() {
  local found status=0
  found=$(blkid --probe --output export "$SHARE_DEVICE") || status=$?
  case $status in
    0)
      grep --quiet --line-regexp TYPE=ext4 <<<"$found" && return
      give_up "the disk $SHARE_DEVICE holds something else than ext4 ($(grep -v ^DEVNAME= <<<"$found" | paste -sd ' ')) and is left alone; attach another disk, or clear this one by hand: wipefs --all and blkdiscard"
      ;;
    2)
      cmp --silent --bytes=1048576 "$SHARE_DEVICE" /dev/zero ||
        give_up "the disk $SHARE_DEVICE has no file system but is not empty, and is left alone; mend it with e2fsck -b 32768, or clear it by hand: blkdiscard --zeroout"
      # No blocks kept for root: all that is written here is written as the job's user.
      mkfs.ext4 -q -m 0 -L tpu-stack "$SHARE_DEVICE"
      did "made an ext4 file system on the empty disk $SHARE_DEVICE"
      ;;
    *) give_up "blkid cannot tell what is on the disk $SHARE_DEVICE (status $status), which is left alone; look at it with wipefs" ;;
  esac
}

# By systemd and /etc/fstab, so that boot and this script cannot both be at it, and fsck runs before. nofail: a gateway
# without its disk still boots and can be looked at.
mount_disk() {
  local uuid unit line others mounted
  uuid=$(blkid --probe --output value --match-tag UUID "$SHARE_DEVICE")
  unit=$(systemd-escape --path --suffix=mount "$SHARE_EXPORT")
  line="UUID=$uuid $SHARE_EXPORT ext4 nofail,noatime,nosuid,nodev,x-systemd.device-timeout=30s 0 2"
  if ! grep --quiet --line-regexp --fixed-strings "$line" /etc/fstab; then
    others=$(awk -v at="$SHARE_EXPORT" '$2 != at || /^#/' /etc/fstab)
    put_file /etc/fstab <<<"$others"$'\n'"$line"
    systemctl daemon-reload
  fi
  mkdir -p "$SHARE_EXPORT"
  mounted=$(findmnt --noheadings --output UUID --mountpoint "$SHARE_EXPORT") || mounted=
  if [[ -z $mounted ]]; then
    systemctl start "$unit" ||
      give_up "cannot mount $SHARE_DEVICE at $SHARE_EXPORT; if fsck found damage, mend it by hand: e2fsck -f $SHARE_DEVICE; see: journalctl --boot --unit '$unit' --unit 'systemd-fsck@*'"
    did "mounted $SHARE_DEVICE at $SHARE_EXPORT"
  elif [[ $mounted != "$uuid" ]]; then
    give_up "$SHARE_EXPORT is another disk (UUID $mounted) than $SHARE_DEVICE (UUID $uuid); reboot to change over"
  fi
}

fit_file_system() {
  local output used
  output=$(resize2fs "$SHARE_DEVICE" 2>&1) || give_up "resize2fs $SHARE_DEVICE: $(tail --lines 1 <<<"$output")"
  [[ $output == *"Nothing to do"* ]] || did "the disk was enlarged: $(tail --lines 1 <<<"$output")"
  if [[ $(stat --format %u:%g:%a "$SHARE_EXPORT") != "$SHARE_UID:$SHARE_GID:755" ]]; then
    chown "$SHARE_UID:$SHARE_GID" "$SHARE_EXPORT"
    chmod 0755 "$SHARE_EXPORT"
    did "$SHARE_EXPORT belongs to $SHARE_UID:$SHARE_GID"
  fi
  used=$(df --output=pcent "$SHARE_EXPORT" | tail --lines 1 | tr -dc 0-9)
  ((used < 95)) || say "WARNING: the share is $used % full; enlarge the disk (tpu-stack:storage.nfs.size-gib) and reboot the gateway"
}

# Security updates every day, never a reboot by itself: it would cut every mount and every tunnel in the middle of a run
# to mend a kernel that only IAP can reach. `sudo reboot` between two runs brings the new kernel in.
keep_updated() {
  put_file /etc/apt/apt.conf.d/52tpu-stack <<'CONF'
APT::Periodic::Update-Package-Lists "1";
APT::Periodic::Unattended-Upgrade "1";
Unattended-Upgrade::Automatic-Reboot "false";
CONF
}

serve() {
  local range exports='' before restart='' packages=(nfs-kernel-server unattended-upgrades curl)
  # v4.1 and later need port 2049 alone; rpcbind and statd are for v3, and would listen on four more.
  mask_units rpcbind.socket rpcbind.service rpc-statd.service rpc-statd-notify.service
  before=$changes
  put_file /etc/nfs.conf.d/tpu-stack.conf <<CONF
[nfsd]
vers2=n
vers3=n
vers4.0=n
threads=$(($(nproc) * 8))
CONF
  ((changes == before)) || restart=yes
  # all_squash: OS Login gives every person another uid, and all of them work on the same runs.
  # mountpoint: never the empty folder of the boot disk in place of the data.
  for range in $SHARE_CLIENTS; do
    exports+="$SHARE_EXPORT $range(rw,sync,all_squash,anonuid=$SHARE_UID,anongid=$SHARE_GID,no_subtree_check,mountpoint)"$'\n'
  done
  put_file /etc/exports.d/tpu-stack.exports <<<"${exports%$'\n'}"
  # With the configuration there before it, the package starts the server that we want and no other.
  if ! all_installed "${packages[@]}"; then
    install_packages "${packages[@]}"
    restart=
  fi
  if [[ -n $restart ]]; then
    systemctl restart nfs-server || give_up "the NFS server does not start; see: journalctl --boot --unit nfs-server"
    did "started the NFS server anew"
  elif ! systemctl --quiet is-active nfs-server; then
    systemctl enable --quiet --now nfs-server ||
      give_up "the NFS server does not start; see: journalctl --boot --unit nfs-server"
    did "started the NFS server"
  fi
  exportfs -ra || give_up "exportfs does not take /etc/exports.d/tpu-stack.exports"
  exportfs -s | grep --quiet --fixed-strings "$SHARE_EXPORT " ||
    give_up "$SHARE_EXPORT is not exported although nothing failed; see: exportfs -ra; exportfs -s"
}

need_settings SHARE_DEVICE SHARE_DISK_WAIT_S SHARE_EXPORT SHARE_CLIENTS SHARE_UID SHARE_GID
one_at_a_time
tell starting
wait_for_disk
make_file_system
mount_disk
fit_file_system
keep_updated
serve
tell yes
if ((changes == 0)); then
  say "ready: $SHARE_EXPORT is exported to $SHARE_CLIENTS; nothing had to be done"
else
  say "ready: $SHARE_EXPORT is exported to $SHARE_CLIENTS"
fi
