pub enum Need {
    Steer,
    Lab,
}
pub fn missing(_n: Need) -> Vec<String> {
    vec![]
}
