package state

// AppStatus is an application's state as users see it, in the words of Ray.
type AppStatus string

// The application states.
const (
	Deploying    AppStatus = "DEPLOYING"
	Running      AppStatus = "RUNNING"
	Unhealthy    AppStatus = "UNHEALTHY"
	DeployFailed AppStatus = "DEPLOY_FAILED"
	Deleting     AppStatus = "DELETING"
)

// Seen is the input of DeriveStatus.
type Seen struct {
	Deleting   bool
	WasRunning bool    // this revision was RUNNING before
	Units      []Phase // of every wanted unit; one that still runs an older revision counts as Pending
}

// DeriveStatus derives an application's status from its units. The first case that applies wins: the
// application is being deleted, a unit failed, all units are ready, this revision was running before, else it
// is deploying.
func DeriveStatus(s Seen) AppStatus {
	ready := 0
	failed := false
	for _, p := range s.Units {
		if p == Ready {
			ready++
		}
		failed = failed || p == Failed
	}
	switch {
	case s.Deleting:
		return Deleting
	case failed:
		return DeployFailed
	case ready == len(s.Units):
		return Running
	case s.WasRunning:
		return Unhealthy
	default:
		return Deploying
	}
}
