//! Opening a TUN device: packets that the kernel routes to it are read from a file, and what is written there arrives.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;

/// The device that makes devices.
pub(crate) const DEVICE: &str = "/dev/net/tun";

/// Makes the device `name` in the network namespace of the calling thread. It ends with the file, which does not block.
///
/// # Errors
/// The system's.
#[expect(unsafe_code, reason = "the system has no other call for this")]
pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE)?;
    // SAFETY: `ifreq` is plain data of which all zeros is a value: no name, no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte is left for the zero at the end.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI;
    request.ifr_ifru.ifru_flags = flags.try_into().map_err(io::Error::other)?;
    // SAFETY: the file is open, and TUNSETIFF reads and writes one `ifreq`, which lives beyond the call.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(file.into()) }
}
