//! Compiles the C++ of this crate against libtorch and tells the linker where the tests find it at run time.
//!
//! A build script's link arguments reach its own package only, so `worker/engine` and `worker/trainer` repeat the rpath line.

use std::path::Path;

const SOURCES: [&str; 4] = ["csrc/store.cpp", "csrc/group.cpp", "csrc/tensor.cpp", "csrc/philox.cpp"];

fn main() {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    println!("cargo::rerun-if-changed=csrc");
    let Ok(libtorch) = std::env::var("LIBTORCH") else {
        println!("cargo::error=LIBTORCH is not set: export LIBTORCH=$(scripts/libtorch.sh) first");
        return;
    };
    let libtorch = Path::new(&libtorch);
    let header = libtorch.join("include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp");
    if !header.is_file() {
        println!(
            "cargo::error=LIBTORCH={} has no {}: unset it and export LIBTORCH=$(scripts/libtorch.sh)",
            libtorch.display(),
            header.display()
        );
        return;
    }
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level(3)
        .flag("-fopenmp")
        .flag("-isystem")
        .flag(libtorch.join("include"))
        .flag("-isystem")
        .flag(libtorch.join("include/torch/csrc/api/include"))
        .flag("-isystem")
        .flag("csrc/gloo_headers")
        .define("USE_C10D_GLOO", None)
        .files(SOURCES)
        .compile("trainctl_collective");
    println!("cargo::rustc-link-search=native={}/lib", libtorch.display());
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}/lib", libtorch.display());
    println!("cargo::metadata=libtorch_lib={}/lib", libtorch.display());
}
