"""The sizes OpenGEM ships: functions that return a full `Config`. Copy one to make your own."""
