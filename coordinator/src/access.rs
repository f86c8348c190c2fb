//! What each method asks of its caller: the one table. A method that is not in it is the owner's alone.

use trainctl_runtime::auth::Access;

/// Service, method, access. A test holds it against the protos.
const TABLE: [(&str, &str, Access); 26] = [
    ("trainctl.v1.Jobs", "Submit", Access::Own),
    ("trainctl.v1.Jobs", "Cancel", Access::Own),
    ("trainctl.v1.Jobs", "List", Access::Read),
    ("trainctl.v1.Jobs", "Get", Access::Read),
    ("trainctl.v1.Jobs", "Watch", Access::Read),
    ("trainctl.v1.Jobs", "Logs", Access::Read),
    ("trainctl.v1.Jobs", "ListWorkers", Access::Read),
    ("trainctl.v1.Jobs", "QuarantineWorker", Access::Own),
    ("trainctl.v1.Jobs", "ReleaseWorker", Access::Own),
    ("trainctl.v1.Grants", "AddGrant", Access::Own),
    ("trainctl.v1.Grants", "ListGrants", Access::Own),
    ("trainctl.v1.Grants", "RevokeGrant", Access::Own),
    ("trainctl.v1.Workers", "Session", Access::Work),
    ("trainctl.v1.Workers", "Enroll", Access::Enroll),
    ("trainctl.v1.Rendezvous", "Set", Access::Work),
    ("trainctl.v1.Rendezvous", "Get", Access::Work),
    ("trainctl.v1.Rendezvous", "Add", Access::Work),
    ("trainctl.v1.Rendezvous", "Check", Access::Work),
    ("trainctl.v1.Rendezvous", "Wait", Access::Work),
    ("trainctl.v1.Rendezvous", "Delete", Access::Work),
    ("trainctl.v1.Rendezvous", "CompareSet", Access::Work),
    ("trainctl.v1.Rendezvous", "NumKeys", Access::Work),
    ("trainctl.v1.TrainerLink", "GetAssignment", Access::Inherited),
    ("trainctl.v1.TrainerLink", "Report", Access::Inherited),
    ("trainctl.v1.TrainerLink", "Withdraw", Access::Inherited),
    ("trainctl.v1.TrainerLink", "Control", Access::Inherited),
];

const HEALTH: &str = "/grpc.health.v1.Health/";

/// What the method of this path asks of its caller.
#[must_use]
pub fn access(path: &str) -> Access {
    if path.starts_with(HEALTH) {
        return Access::Anyone;
    }
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else {
        return Access::Own;
    };
    TABLE.iter().find(|row| (row.0, row.1) == (service, method)).map_or(Access::Own, |row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_the_protos_has_its_row() {
        let mut rows: Vec<String> = TABLE.iter().map(|(service, method, _)| format!("/{service}/{method}")).collect();
        let mut methods: Vec<String> = trainctl_proto::METHODS.iter().map(|path| (*path).to_owned()).collect();
        rows.sort();
        methods.sort();
        assert_eq!(rows, methods, "add the new method to the table, with what it asks of its caller");
        assert!(methods.len() > 20, "the methods were not found");
    }

    #[test]
    fn what_is_not_in_the_table_is_the_owners() {
        assert_eq!(access("/grpc.health.v1.Health/Check"), Access::Anyone);
        for path in ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/trainctl.v1.Jobs/New", "/", "", "x"]
        {
            assert_eq!(access(path), Access::Own, "{path}");
        }
        assert_eq!(access("/trainctl.v1.Jobs/List"), Access::Read);
        assert_eq!(access("/trainctl.v1.Workers/Enroll"), Access::Enroll);
    }
}
