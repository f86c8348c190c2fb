//! Names for return addresses of another process: function, file and line where the binaries have them.

use blazesym::Pid;
use blazesym::symbolize::source::{Process, Source};
use blazesym::symbolize::{Input, Reason, Sym, Symbolized, Symbolizer};
use trainctl_proto::v1::ThreadStack;

/// Fills in `frames` from `addresses`. The process must still be there: its map of files is read. An address without a name
/// stays a number.
pub(super) fn name(pid: u32, threads: &mut [ThreadStack]) {
    // Debug information where the file has it, or the distribution keeps it for the file.
    let symbolizer = Symbolizer::builder().enable_code_info(true).enable_inlined_fns(true).build();
    let mut process = Process::new(Pid::from(pid));
    // The other way to the files needs a capability.
    process.map_files = false;
    let source = Source::Process(process);
    // One by one: a file that cannot be read takes the names of its own addresses only.
    let name = |address: u64| match symbolizer.symbolize_single(&source, Input::AbsAddr(address)) {
        Ok(named) => named,
        Err(error) => {
            tracing::debug!(pid, address, %error, "an address of a stack has no name");
            Symbolized::Unknown(Reason::UnknownAddr)
        }
    };
    for thread in threads.iter_mut() {
        let addresses = thread.addresses.iter().enumerate();
        thread.frames = addresses.flat_map(|at| frames(*at.1, &name(call_site(at)))).collect();
    }
}

/// All but the innermost address are those of the instruction after the call.
fn call_site((depth, address): (usize, &u64)) -> u64 {
    if depth == 0 { *address } else { address.saturating_sub(1) }
}

/// The frames that one address stands for: functions that were inlined there first.
fn frames(address: u64, named: &Symbolized<'_>) -> Vec<String> {
    match named {
        Symbolized::Sym(sym) => in_order(sym),
        Symbolized::Unknown(_) => vec![format!("{address:#x}")],
    }
}

fn in_order(sym: &Sym<'_>) -> Vec<String> {
    let place = |info: Option<&blazesym::symbolize::CodeInfo<'_>>| {
        let info = info?;
        let file = info.file.to_string_lossy();
        Some(info.line.map_or_else(|| format!(" ({file})"), |line| format!(" ({file}:{line})")))
    };
    let inlined = sym.inlined.iter().rev();
    let inlined = inlined.map(|f| format!("{}{}", f.name, place(f.code_info.as_ref()).unwrap_or_default()));
    let own = format!("{}{}", sym.name, place(sym.code_info.as_deref()).unwrap_or_default());
    inlined.chain([own]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn a_function_of_ours() -> u64 {
        let address = a_function_of_ours as fn() -> u64 as usize as u64;
        std::hint::black_box(address)
    }

    #[test]
    fn addresses_of_a_process_get_the_names_of_their_functions() {
        let addresses = vec![a_function_of_ours(), 1];
        let mut threads = [ThreadStack { addresses, ..ThreadStack::default() }];
        name(std::process::id(), &mut threads);
        let is_named = |frame: &String| frame.contains("a_function_of_ours");
        assert!(threads[0].frames.iter().any(is_named), "{:?}", threads[0].frames);
        assert_eq!(threads[0].frames.last().unwrap(), "0x1");
    }
}
