package state

// AppStatus is an application's state as users see it; the words are Ray's.
type AppStatus string

// The application states.
const (
	Deploying    AppStatus = "DEPLOYING"
	Running      AppStatus = "RUNNING"
	Unhealthy    AppStatus = "UNHEALTHY"
	DeployFailed AppStatus = "DEPLOY_FAILED"
	Deleting     AppStatus = "DELETING"
)

// Seen is what DeriveStatus looks at.
type Seen struct {
	Deleting   bool
	WasRunning bool    // this revision was RUNNING before
	Units      []Phase // of every wanted unit; one that still runs an older revision counts as Pending
}

// DeriveStatus sums up the units of an application. The first row that fits wins: being deleted, any unit failed, all
// ready, this revision ran before, else on its way.
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
