//! Tells the linker where the test binaries find libtorch at run time.
fn main() {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    match std::env::var("LIBTORCH") {
        Ok(libtorch) => println!("cargo::rustc-link-arg=-Wl,-rpath,{libtorch}/lib"),
        Err(_) => println!("cargo::error=LIBTORCH is not set: export LIBTORCH=$(scripts/libtorch.sh) first"),
    }
}
