// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words of commands that are printed for an administrator to paste. Others choose some of them: a
//! container names the other end of its veth.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

/// `text` as one word of a shell. Plain words stay as they are. What a terminal would not show as it is
/// becomes octal in `$'…'`, as bash, zsh and the shell of POSIX 2024 read it.
pub fn quoted(text: impl AsRef<OsStr>) -> String {
    let bytes = text.as_ref().as_bytes();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-./:=,@%+".contains(byte);
    let shown = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return text.as_ref().to_string_lossy().into_owned();
    }
    let escapes = !bytes.iter().all(shown);
    let mut word = String::from(if escapes { "$'" } else { "'" });
    for byte in bytes {
        // Writing to a string can't fail.
        let _ = match (byte, escapes) {
            (b'\'', false) => write!(word, r"'\''"),
            (b'\'' | b'\\', true) => write!(word, r"\{}", *byte as char),
            _ if shown(byte) => write!(word, "{}", *byte as char),
            _ => write!(word, r"\{byte:03o}"),
        };
    }
    word.push('\'');
    word
}

/// The command that writes 0 to these files of the folder `queues` of a device, as in
/// `rx-*/rps_cpus`.
pub fn zero_queue_files(device: &str, files: &[impl AsRef<str>]) -> String {
    let queues = format!("/sys/class/net/{}/queues/", quoted(device));
    let paths: Vec<_> = (files.iter())
        .map(|file| format!("{queues}{}", file.as_ref()))
        .collect();
    write_to_each(&paths.join(" "), 0)
}

/// The command that writes a number to each of these files: words of a shell, which it may expand.
pub fn write_to_each(files: &str, number: u64) -> String {
    format!("for f in {files}; do echo {number} > \"$f\"; done")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_takes_words_back_as_they_were() {
        let words: [&[u8]; 12] = [
            b"eth0",
            b"veth-1.2@if3",
            b"",
            b";reboot;#",
            b"$(id)`id`",
            b"it's",
            b"a b*?[c]~{d,e}!",
            b"-n",
            b"\xff\xfe",
            b"\x1b[2J'\\n",
            "größe".as_bytes(),
            b"\"\\",
        ];
        for word in words {
            let quoted = quoted(OsStr::from_bytes(word));
            let printable = quoted.chars().all(|c| c.is_ascii_graphic() || c == ' ');
            assert!(printable, "{quoted:?}");
            let script = format!("printf %s {quoted}");
            // The scripts of this project need it as well.
            let output = Command::new("bash").args(["-c", &script]).output();
            let output = output.expect("bash is there");
            assert_eq!(output.stdout, word, "{quoted}");
        }
        assert_eq!(super::quoted("eth0"), "eth0");
        assert_eq!(super::quoted(";reboot;#"), "';reboot;#'");
    }
}
