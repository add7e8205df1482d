package cluster_test
import ("log/slog";"os")
func dbg(name string) *slog.Logger { if os.Getenv("DBG")=="" {return nil}; return slog.New(slog.NewTextHandler(os.Stderr,&slog.HandlerOptions{Level:slog.LevelDebug})).With("n",name) }
